"""Update rules as pure functions on flat tensors, and learning-rate schedules."""
