"""Update rules that change flat tensors or matrices in place, and learning-rate schedules."""
