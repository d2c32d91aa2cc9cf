id=${SLURM_JOB_ID:?submit this script with sbatch}
mapfile -t allocated < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# Runs the command on every node of `here`. A node that fails or ends early must not end the others.
on_all() {
    local without=''
    ((${#out[@]} == 0)) || without=$(IFS=, && echo "${out[*]}")
    srun --nodes="${#here[@]}" --ntasks="${#here[@]}" --ntasks-per-node=1 ${without:+--exclude="$without"} \
        --kill-on-bad-exit=0 --no-kill --wait=0 --cpu-bind=none "$@"
}

answers() { timeout 20 srun --nodes=1 --ntasks=1 --nodelist="$1" true; }

warn_in_time() { :; } # Slurm warns the script by the signal of the directive --signal above
