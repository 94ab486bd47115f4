"""What a layer computes: a decode step, a prompt, and what they are given."""
