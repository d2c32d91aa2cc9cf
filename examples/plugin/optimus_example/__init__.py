"""A plugin for Optimus. The list `ROWS` is all that Optimus asks of it."""

from optimus_example.early_stop import EARLY_STOP
from optimus_example.mail import MAIL
from optimus_example.seed_oss import SEED_OSS
from optimus_example.sgd import SGD, STEP

ROWS = [SEED_OSS, SGD, STEP, EARLY_STOP, MAIL]
