"""Update rules, learning-rate schedules and training losses."""
