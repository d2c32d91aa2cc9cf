task=${PBS_ARRAY_INDEX:-0}

# Submits this script as an array for the stage $1 with $2 tasks, which begin when all tasks of the job $3 have succeeded.
# Prints the name of the job. An array of PBS has at least two tasks.
submit() {
    local options=(${3:+-W "depend=afterok:$3"})
    (($2 == 1)) || options+=(-J "0-$(($2 - 1))")
    sed "s/^stage=\$/stage=$1/" "$0" | qsub "${options[@]}"
}

cancel() { qdel "$1"; }
