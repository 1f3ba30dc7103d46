"""The `shop` domain: find the requested item, choose its options and buy it; after WebShop (Yao et al., arXiv 2207.01206).

An episode: "want oak wax lamp, color lime, motif star, under 60.", `search oak wax lamp`, "Kelmar oak wax lamp 45; ...",
`click Kelmar`, "Kelmar oak wax lamp 45. color rose lime. motif moon star.", `click lime`, `click star`, `click buy`. Each shop
has its own catalogue, drawn by seed; the reward is WebShop's share of matched attributes, options and price.
"""

from stages.environments.shop.domain import ShopDomain
from stages.environments.shop.environment import ShopEnvironment
from stages.environments.shop.settings import ShopSettings

__all__ = ["ShopDomain", "ShopEnvironment", "ShopSettings"]
