"""Workers that are processes of this machine: their rollouts lie in memory that both sides share."""
