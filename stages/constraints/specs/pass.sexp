; Plan, act, summarise, solve (Crouse et al., arXiv 2310.08535): a plan, then any number of actions, which run together at the end of
; the turn; their results are the summary.
(states
  (question env)
  (plan "[Plan]" (say "I look for the next fact."))
  (action "[Action]" (send "{}"))
  (summary env)
  (final_thought "[Final Thought]" (say "I know the answer."))
  (answer "[Answer]" (send "answer {}")))
(behaviour
  (next question
        (until_5 (next plan (until_5 action summary)) final_thought)
        answer))
