"""Keep the rows of rollouts on a GPU, and record policies and whole rollouts as CUDA graphs."""
