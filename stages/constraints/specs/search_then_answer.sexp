; The actions of search and factbook as they are: up to five searches, then an answer.
(states
  (question env)
  (search "search" turn)
  (result env)
  (answer "answer" turn))
(behaviour
  (next question (until_5 (next search result) answer)))
