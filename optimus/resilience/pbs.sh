id=${PBS_JOBID:?submit this script with qsub}
id=${id%%[!0-9]*}
mapfile -t allocated < <(awk '!seen[$0]++' "$PBS_NODEFILE")

# Runs the command on every node of `here`.
on_all() {
    printf '%s\n' "${here[@]}" >"$scratch/hosts"
    mpiexec -n "${#here[@]}" --ppn 1 --hostfile "$scratch/hosts" "$@"
}

answers() {
    printf '%s\n' "$1" >"$scratch/host-$1"
    timeout 20 mpiexec -n 1 --ppn 1 --hostfile "$scratch/host-$1" true
}

# PBS does not warn scripts before the time limit, so a timer sends SIGTERM to this script.
warn_in_time() {
    {
        trap 'kill "$nap"; exit' TERM
        sleep @UNWARNED@ &
        nap=$!
        wait "$nap"
        kill -TERM "$$"
    } >/dev/null 2>&1 &
    timer=$!
}
