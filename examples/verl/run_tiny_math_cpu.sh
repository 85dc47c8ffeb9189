#!/usr/bin/env bash
# GRPO of the tiny policy on a laptop, in the active environment, or that of `make env`. Arguments are passed to veRL.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin="${VENV:-${VIRTUAL_ENV:-.venv}}/bin"

"$bin/python" examples/tiny_math/prepare_data.py
# shellcheck disable=SC2046
exec env $("$bin/das-adapter" cpu-env) "$bin/python" -m verl.trainer.main_ppo \
  --config-path "$PWD/examples/verl" --config-name grpo_tiny_math_cpu "$@"
