; ReAct (Yao et al., arXiv 2210.03629): thought, action and observation, up to five times, then a final thought and the answer.
(states
  (question env)
  (thought "[Thought]" (say "I look for the next fact."))
  (action "[Action]")
  (action_input "[Input]" (send "{action} {}"))
  (observation env)
  (final_thought "[Final Thought]" (say "I know the answer."))
  (answer "[Answer]" (send "answer {}")))
(behaviour
  (next question
        (until_5 (next thought action action_input observation) final_thought)
        answer))
