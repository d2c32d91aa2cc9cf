#!/bin/bash
@DIRECTIVES@
#
# Written by `optimus launch --scheduler @SCHEDULER@`; submit this script with @SUBMIT@. The script restarts a run on
# the remaining nodes until the run has finished, in at most `attempts` launches. Load modules here, if `optimus` needs
# any.

set -u
cd -- @FOLDER@ || exit 1
PATH=$PATH:@BIN@   # for jobs that do not inherit the environment; another `optimus` in PATH comes first

run=@RUN@
nodes=@NODES@      # number of nodes that train; the other nodes of the job are spares
attempts=10        # largest number of launches in this job
command=(@COMMAND@)

say() { printf 'job %s: %s\n' "$id" "$*"; }

@SYSTEM@
rm -rf -- "$run/.job-$id-"*   # what this job has left before the batch system requeued it
mkdir -p -- "$run" && scratch=$(mktemp -d -- "$run/.job-$id-XXXXXX") || exit 1
store='' timer='' alive='' stopping=''

# shellcheck disable=SC2329  # called by a trap
clean_up() {
    [ -z "$timer" ] || kill "$timer" 2>/dev/null
    [ -z "$alive" ] || { kill -KILL "$alive" && wait "$alive"; } 2>/dev/null
    [ -z "$store" ] || { kill -KILL "$store" && wait "$store"; } 2>/dev/null
    rm -rf -- "$scratch"
}
trap clean_up EXIT

# Stops the run when the job's time limit is near, or when a user or the batch system stops the job. Not every launcher
# forwards signals, so each node looks for the file `stop`; the node's ranks then finish their step and save.
# shellcheck disable=SC2329  # called by a trap
stop() {
    stopping=yes
    : >"$scratch/stop"
}
trap stop TERM INT
warn_in_time

# Shows the nodes that the host of this script lives, also after a signal to the whole job, while other nodes save.
(
    trap '' TERM INT
    trap - EXIT
    for ((beat = 1; ; beat++)); do
        echo "$beat" >"$scratch/alive" || exit
        sleep 1
    done
) 2>/dev/null &
alive=$!

# The script that starts the agent on every node. The script exits with 0, because some launchers end all nodes when one has
# failed. The script writes the agent's exit code to a file, which is missing for a dead node.
cat >"$scratch/node.sh" <<'END'
scratch=$1 attempt=$2
shift 2
node=${SLURMD_NODENAME:-$(hostname)}
node=${node%%.*}
"$@" --node "$node" &
agent=$!
trap 'kill -TERM "$agent"' TERM
(
    while [ ! -e "$scratch/stop" ]; do
        kill -0 "$agent" || exit 0 # the agent has ended, and perhaps the parent of this shell too
        sleep 2
    done
    kill -TERM "$agent"
) >/dev/null 2>&1 &
watcher=$!
while :; do # a signal to this shell ends `wait` early
    wait "$agent"
    code=$?
    kill -0 "$agent" 2>/dev/null || break
done
kill "$watcher" 2>/dev/null
echo "$code" >"$scratch/$attempt/code-$node"

# If the host of the batch script is lost, nothing waits for this node, and the job would hold its nodes until its time
# limit. One of the nodes that are left then starts the job again, or at least ends it.
beat=$(cat "$scratch/alive" 2>/dev/null)
for ((waited = 0; waited < 40; waited++)); do
    sleep 1
    [ -e "$scratch/alive" ] || exit 0 # the host has removed the folder
    [ "$(cat "$scratch/alive" 2>/dev/null)" = "$beat" ] || exit 0 # the host lives
done
mkdir "$scratch/ending" 2>/dev/null || exit 0
printf '{"time": %s, "kind": "failure", "node": "%s", "rank": null, "step": null, "seconds": null, "detail": "%s"}\n' "$(date +%s.%N)" "$node" \
    "the host of the batch script is lost: the job is requeued, or ended if it must not be" >>"${scratch%/*}/events.jsonl"
if [ -n "${SLURM_JOB_ID-}" ]; then
    scontrol requeue "$SLURM_JOB_ID" || scancel "$SLURM_JOB_ID"
else
    qrerun "$PBS_JOBID" || qdel "$PBS_JOBID"
fi
exit 0
END

# Starts the rendezvous store on the node that runs this script. If that node is lost, the job ends or is requeued anyway,
# so the store adds no point of failure. Each attempt restarts a store that has died.
start_store() {
    local try
    for try in 0 1 2 3 4; do
        port=$((20000 + (id + 1009 * try) % 10000))
        : >"$scratch/store"
        # A signal to the whole job must not end the store before the nodes have saved.
        (trap '' TERM INT && exec optimus rendezvous --port "$port" --address "$(own_address)") >>"$scratch/store" &
        store=$!
        while kill -0 "$store" 2>/dev/null; do
            [ ! -s "$scratch/store" ] || return 0 # the store prints its address when it listens
            sleep 0.1
        done
    done
    say "\`optimus rendezvous\` does not start here, see above"
    exit 1
}

# Prints an address at which other nodes reach this node, or else the name of this node. A node may resolve its own name
# to 127.0.1.1, which other nodes cannot reach.
own_address() {
    local address
    for address in $(getent ahostsv4 "$(hostname)" | cut -d ' ' -f 1) $(hostname -I); do
        case $address in
            127.* | *:*) ;;
            *) echo "$address" && return ;;
        esac
    done
    hostname
}

# Writes a file `silent-NODE` for each node that is not excluded, left no exit code in the previous attempt, and does
# not answer now.
find_silent() {
    local before=$1 node asked=()
    rm -f -- "$scratch"/silent-*
    for node in "${allocated[@]}"; do
        if [ -n "${excluded[${node%%.*}]-}" ] || [ -e "$before/code-${node%%.*}" ]; then
            continue
        fi
        { answers "$node" >/dev/null 2>&1 || : >"$scratch/silent-${node%%.*}"; } &
        asked+=("$!")
        if ((${#asked[@]} == 16)); then
            wait "${asked[@]}"
            asked=()
        fi
    done
    ((${#asked[@]} == 0)) || wait "${asked[@]}"
}

# Sets `here` to the nodes of the job that are neither excluded nor silent, and `out` to the other nodes.
choose_nodes() {
    local name node
    declare -gA excluded=()
    here=() out=()
    if [ -e "$run/excluded.txt" ]; then
        while read -r name || [ -n "$name" ]; do
            [ -z "$name" ] || excluded[${name%%.*}]=yes
        done <"$run/excluded.txt"
    fi
    ((attempt == 1)) || find_silent "$scratch/$((attempt - 1))"
    for node in "${allocated[@]}"; do
        if [ -n "${excluded[${node%%.*}]-}" ] || [ -e "$scratch/silent-${node%%.*}" ]; then
            out+=("$node")
        else
            here+=("$node")
        fi
    done
}

# Prints the number of events "finished" in the run's event log. Exit codes are no evidence, since an excluded node exits
# with 1 even if the run has finished.
times_finished() {
    local found=0
    [ ! -e "$run/events.jsonl" ] || found=$(grep -c '"kind": "finished"' "$run/events.jsonl")
    echo "$found"
}

# Returns 0 if all nodes have ended and all their errors were bad input (2), which another attempt cannot cure. Returns 1 if
# a node had another error or left no exit code, or if no node had an error.
is_bad_input() {
    local files file code found=''
    for file in "$scratch/$attempt"/code-*; do
        [ -e "$file" ] || return 1
        read -r code <"$file"
        case $code in
            0) ;;
            2) found=yes ;;
            *) return 1 ;;
        esac
    done
    files=("$scratch/$attempt"/code-*)
    [ -n "$found" ] && ((${#files[@]} == ${#here[@]}))
}

# Waits at most a minute until all nodes have ended. A signal to the whole job ends the launcher at once, while ranks
# still save.
wait_for_nodes() {
    local waited files
    for ((waited = 0; waited < 60; waited++)); do
        files=("$scratch/$attempt"/code-*)
        if [ -e "${files[0]}" ] && ((${#files[@]} == ${#here[@]})); then
            return
        fi
        sleep 1
    done
}

for ((attempt = 1; attempt <= attempts; attempt++)); do
    choose_nodes
    if ((${#here[@]} < nodes)); then
        say "${#here[@]} of ${#allocated[@]} nodes are left and $nodes are needed (out: ${out[*]}):" \
            "see $run/events.jsonl and $run/excluded.txt, and submit the job again"
        exit 1
    fi
    if [ -z "$store" ] || ! kill -0 "$store" 2>/dev/null; then
        start_store
    fi
    [ -z "$stopping" ] || break
    mkdir -- "$scratch/$attempt" || exit 1
    before=$(times_finished)
    say "attempt $attempt of $attempts on ${#here[@]} nodes, $((${#here[@]} - nodes)) of them spares${out[*]:+; without ${out[*]}}"
    on_all bash "$scratch/node.sh" "$scratch" "$attempt" "${command[@]}" --spares $((${#here[@]} - nodes)) \
        --rendezvous "$(own_address):$port" --name "$id-$attempt" &
    launcher=$!
    while :; do # a signal to this shell ends `wait` early
        wait "$launcher"
        kill -0 "$launcher" 2>/dev/null || break
    done
    if [ -n "$stopping" ]; then
        wait_for_nodes
        break
    fi
    if (($(times_finished) > before)); then
        say "the run has finished: $run"
        exit 0
    fi
    if is_bad_input; then
        say "the run cannot continue with this configuration, see above"
        exit 2
    fi
    say "attempt $attempt ended before the run did"
done
if [ -n "$stopping" ]; then
    say "the job was told to stop; submit it again to continue from the newest checkpoint"
else
    say "all $attempts attempts are used up: see $run/events.jsonl"
fi
exit 1
