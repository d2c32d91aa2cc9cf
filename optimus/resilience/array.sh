#!/bin/bash
@DIRECTIVES@
#
# Written by `optimus launch --prepare --scheduler @SCHEDULER@`; @SUBMIT@ submits two array jobs: the tasks of the first
# tokenise, those of the second write the shards as soon as all of the first are done. Submit again to continue what has
# not finished. Load modules here, if `optimus` needs any.

stage=

@SYSTEM@
if [ -z "$stage" ]; then # on the machine that submits
    streams=$(submit streams @TASKS@) || exit 1
    if ! shards=$(submit shards @SHARDTASKS@ "$streams"); then
        cancel "$streams"
        echo "the tasks of stage shards cannot be submitted, see above: job $streams of stage streams is cancelled" >&2
        exit 1
    fi
    echo "submitted: $streams (stage streams, tasks: @TASKS@), then $shards (stage shards, tasks: @SHARDTASKS@)"
    exit
fi

set -u
cd -- @FOLDER@ || exit 1
PATH=$PATH:@BIN@   # for jobs that do not inherit the environment; another `optimus` in PATH comes first

attempts=3   # largest number of attempts of a task; each continues the one before
arguments=(@ARGUMENTS@)

say() { printf 'stage %s, task %s: %s\n' "$stage" "$task" "$*"; }

for ((attempt = 1; attempt <= attempts; attempt++)); do
    optimus prepare --tasks @TASKS@ --task "$task" --stage "$stage" "${arguments[@]}"
    code=$?
    case $code in
        0) exit 0 ;;
        2) exit 2 ;; # bad input, which another attempt cannot cure
        129 | 130 | 143)
            say "told to stop; submit again to continue"
            exit "$code"
            ;;
    esac
    say "attempt $attempt of $attempts ended with exit code $code"
done
exit "$code"
