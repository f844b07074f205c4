#!/usr/bin/env bash
# Restarts a command until its run is finished, for machines that are preempted or reboot. The run resumes from its
# newest checkpoint. Errors that would repeat are not retried.
#
#     bash scripts/run_forever.sh OUTPUT_DIR COMMAND...
#     bash scripts/run_forever.sh output torchrun -m fsdp_qlora train --train_type qlora --dataset alpaca --output_dir output
#
# Exit status: 0 when the run is finished, else that of the last start. Ctrl-C, SIGTERM or SIGHUP ends the run,
# with a checkpoint, and this script. With --once before OUTPUT_DIR the command is started once, for schedulers that
# restart by the exit status: torchrun's own is 1 for every failure.
set -u
once=""
[ "${1:-}" = --once ] && once=1 && shift
output_dir="${1:?usage: run_forever.sh [--once] OUTPUT_DIR COMMAND...}"
shift
export FSDP_QLORA_AUTO_RESTART=1 # a start that has made no progress three times is refused
note=$(mktemp -u) # what ends a start before it has a folder leaves its exit status here
[ -n "$once" ] && export FSDP_QLORA_NOTE_FILE="$note"
child=""
stopped=""
# torchrun's own exit status is 1 for every end, so the run's is read from its folder.
field() { sed -n "s/^ *\"$1\": *\"\{0,1\}\([^\",]*\)\"\{0,1\},\{0,1\}\$/\1/p" "$output_dir/status.json" 2>/dev/null; }
forward() {
    stopped=1
    [ -n "$child" ] && kill -TERM "$child" 2>/dev/null
}
trap forward INT TERM HUP # under nohup HUP stays ignored
launch() {
    "$@" &
    child=$!
    [ -n "$stopped" ] && forward # the signal came before there was a child
}

pause="${RUN_FOREVER_PAUSE:-5}"
early=0
while :; do
    started=$SECONDS
    before=$(cksum "$output_dir/status.json" 2>/dev/null)
    launch "$@"
    wait "$child"
    status=$?
    while kill -0 "$child" 2>/dev/null; do # the trap has interrupted the wait
        wait "$child"
        status=$?
    done
    state=""
    [ "$before" != "$(cksum "$output_dir/status.json" 2>/dev/null)" ] && state=$(field state)
    code=$(field exit_code)
    [ -z "$state" ] && [ -s "$note" ] && state=refused code=$(sed 's/^\[\([0-9]*\),.*/\1/' "$note") && rm "$note"
    [ -n "$state" ] && [ "$code" -gt 0 ] 2>/dev/null && [ "$status" -ne 0 ] && status=$code
    [ "$status" -eq 0 ] && exit 0
    [ -n "$stopped$once" ] && exit "$status"
    case "$status" in
    2 | 3 | 4 | 130) # bad input, budget used up, no progress, Ctrl-C
        echo "run_forever: not started again (exit status $status)." >&2
        exit "$status"
        ;;
    esac
    # On the machines without OUTPUT_DIR, only the time says that it has trained.
    if [ -n "$state" ] || [ $((SECONDS - started)) -ge "${RUN_FOREVER_EARLY:-300}" ]; then
        early=0
    else
        early=$((early + 1))
    fi
    if [ "$early" -ge 3 ]; then
        echo "run_forever: not started again, since three starts have ended before they began to train." >&2
        exit "$status"
    fi
    echo "run_forever: ended with status $status${state:+ ($state)}; started again in $pause s." >&2
    launch sleep "$pause"
    wait "$child"
    [ -n "$stopped" ] && exit "$status"
done
