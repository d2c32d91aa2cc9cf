id=${SLURM_JOB_ID:?submit this script with sbatch}
mapfile -t allocated < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# The command on every node that is in. A node that fails or ends early must not take the others with it.
on_all() {
    local without=''
    ((${#out[@]} == 0)) || without=$(IFS=, && echo "${out[*]}")
    srun --nodes="${#here[@]}" --ntasks="${#here[@]}" --ntasks-per-node=1 ${without:+--exclude="$without"} \
        --kill-on-bad-exit=0 --no-kill --wait=0 --cpu-bind=none "$@"
}

answers() { timeout 60 srun --nodes=1 --ntasks=1 --nodelist="$1" true; }

warn_in_time() { :; } # Slurm does, by the signal that is asked for above
