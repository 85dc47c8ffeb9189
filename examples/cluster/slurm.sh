#!/bin/bash
#SBATCH --job-name=das
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
# A Ray cluster over the nodes of a Slurm job, in containers, with room in /dev/shm for Ray's object store and the
# history; then the command, on the first node:
#     CONTAINER=verl-das.sqsh sbatch das-adapter/examples/cluster/slurm.sh python3 -m verl.trainer.main_ppo …
# It runs in the directory where sbatch is called, which is mounted and must not be a checkout of das-adapter. CONTAINER
# is a file or an image of a registry. pyxis and enroot start the containers. The node's own /dev/shm is mounted:
# enroot's would be a small one of its own.
set -euo pipefail

OBJECT_STORE=${OBJECT_STORE:-64} # GiB a node for Ray's objects
HISTORY=${HISTORY:-8}            # GiB: history.max_bytes of the block
NEEDED=$((OBJECT_STORE + 4 * HISTORY + 1))
PORT=${PORT:-6379}
# One token for all nodes and the command: newer versions of Ray ask for it where they find one.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(cat /proc/sys/kernel/random/uuid)}
: "${CONTAINER:?image for pyxis}" "${1:?the command to run}"
# What begins with neither a dot nor a slash is an image of a registry to pyxis.
if [ -f "$CONTAINER" ]; then CONTAINER=$(realpath "$CONTAINER"); fi
if [ -e das_adapter/__init__.py ]; then
    echo "$PWD is a checkout of das-adapter, which hides the container's package: call sbatch in another directory" >&2
    exit 1
fi

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
inside=(srun --container-image="$CONTAINER" --container-mounts="/dev/shm:/dev/shm,$PWD:$PWD" --container-workdir="$PWD"
    --container-name=das --overlap)

# Each node says what it has; one with less than is needed ends the job.
srun bash -c 'has=$(($(df --output=size -B1 /dev/shm | tail -n 1) >> 30))
    echo "$(hostname): /dev/shm has $has GiB, '"$NEEDED"' are needed"; [ "$has" -ge '"$NEEDED"' ]'

ray=(ray start --block --disable-usage-stats --object-store-memory="$((OBJECT_STORE << 30))")
"${inside[@]}" --nodes=1 --ntasks=1 -w "$head" "${ray[@]}" --head --port="$PORT" &
ray_head=$!
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    "${inside[@]}" --nodes="$((SLURM_JOB_NUM_NODES - 1))" --ntasks="$((SLURM_JOB_NUM_NODES - 1))" --exclude="$head" \
        bash -c "until (: < /dev/tcp/$head/$PORT) 2> /dev/null; do sleep 2; done; exec \"\$@\"" worker \
        "${ray[@]}" --address="$head:$PORT" &
fi

# This script is on the first node, as the head is. The command's step begins when the head answers: two steps at once
# would both make that node's container.
until (: < "/dev/tcp/$head/$PORT") 2> /dev/null; do
    kill -0 "$ray_head" 2> /dev/null || { echo "Ray's head on $head has ended" >&2; exit 1; }
    sleep 2
done

# The command begins when every node is there.
WAIT='import os, sys, time, ray
address, nodes, *command = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < int(nodes):
    time.sleep(2)
ray.shutdown()
os.environ["RAY_ADDRESS"] = address
os.execvp(command[0], command)'
"${inside[@]}" --nodes=1 --ntasks=1 -w "$head" \
    python3 -c "$WAIT" "$head:$PORT" "$SLURM_JOB_NUM_NODES" "$@"
