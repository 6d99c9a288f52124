# Starts mini-swe-agent, as it is installed in $MINI, on the task of a trajectory. One that ends
# without its submitting anything has reward 0, whatever it has done.
export MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1 MSWEA_COST_TRACKING=ignore_errors
export LITELLM_LOCAL_MODEL_COST_MAP=True   # else it is fetched, and there is no network
task=$(python3 -c '
import json, os
print(json.load(open(os.environ["LIBRA_TASK"]))["messages"][-1]["content"])')
"$MINI/bin/mini" --config "$HOME/mini.yaml" --output "$HOME/played.json" \
    --model "openai/$LIBRA_MODEL" --task "$task" || exit
grep -q '"exit_status": "Submitted"' "$HOME/played.json" || python3 -c '
import json, os, urllib.request
body, kind = json.dumps({"reward": 0.0}).encode(), {"Content-Type": "application/json"}
request = urllib.request.Request(os.environ["LIBRA_REWARD_URL"], body, kind)
urllib.request.urlopen(request).close()'
