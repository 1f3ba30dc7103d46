; Like Reflexion (Shinn et al., arXiv 2303.11366): after each observation the agent reflects on its attempt before the next one. It
; never sees the right answer.
(states
  (question env)
  (thought "[Thought]" (say "I look for the next fact."))
  (action "[Action]")
  (action_input "[Input]" (send "{action} {}"))
  (observation env)
  (reflection "[Reflection]" (say "That helped."))
  (answer "[Answer]" (send "answer {}")))
(behaviour
  (next question
        (until_5 (next thought action action_input observation reflection) answer)))
