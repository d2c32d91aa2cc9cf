task=${SLURM_ARRAY_TASK_ID-}

# Submits this script as an array for the stage $1 with $2 tasks, which begin when all tasks of the job $3 have succeeded.
# Prints the number of the array.
submit() {
    local id after=(${3:+--dependency="afterok:$3" --kill-on-invalid-dep=yes})
    id=$(sed "s/^stage=\$/stage=$1/" "$0" | sbatch --parsable --array="0-$(($2 - 1))" "${after[@]}") || return
    echo "${id%%;*}" # without the name of the cluster
}

cancel() { scancel "$1"; }
