// Elements with text whose contrast to their background is below WCAG's AA: 4.5, or 3 for large text.
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
function rgba(text) { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1); const d = canvas.getImageData(0, 0, 1, 1).data; return [d[0], d[1], d[2], d[3] / 255]; }
function over(top, under) { return [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat(1); }
function back(item) {
  const layers = [];
  for (let at = item; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
  return layers.reverse().reduce((under, top) => top[3] ? over(top, under) : under, [255, 255, 255, 1]);
}
function light(c) { const f = c.slice(0, 3).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * f[0] + 0.7152 * f[1] + 0.0722 * f[2]; }
const seen = {};
for (const item of document.querySelectorAll("body *")) {
  const own = [...item.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  if (!own || !item.checkVisibility() || item.closest("[disabled], script, noscript, .skip")) continue;
  const style = getComputedStyle(item), size = parseFloat(style.fontSize), big = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  const ground = back(item), ink = over(rgba(item.closest("svg") ? style.fill : style.color), ground), a = light(ink), b = light(ground);
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < (big ? 3 : 4.5)) seen[item.tagName + "." + item.getAttribute("class") + " " + ratio.toFixed(2)] = item.textContent.slice(0, 30);
}
return Object.entries(seen).map(one => one.join(": "));
