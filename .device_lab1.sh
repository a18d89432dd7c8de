# 100 seconds at most; timing-sensitive only mildly (it shows how long things take)
# Trial of the lab's CUDA path: smoke, then every scheme of the paper preset with 100 steps.
export PYTHONPATH=src PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
python3 -V; nproc; free -g | head -2; command -v nvidia-cuda-mps-control || echo "no MPS"; nvidia-smi --query-gpu=name,memory.used,compute_mode --format=csv
python3 -c "import importlib.util as u; print({m: bool(u.find_spec(m)) for m in ('numpy','rich','plotly','typer','safetensors')})"
W=$(mktemp -d)
( nvidia-smi dmon -s um -d 2 -o T > $OUT/dmon.txt & echo $! > $W/pid )
t0=$(date +%s)
echo "== smoke"
timeout -k 3 40 python3 -m posenc compare --preset smoke --device cuda --schemes alibi rope rope+ntk:8 --seeds 1 --jobs 4 --out $W/smoke > $OUT/smoke.txt 2>&1
echo "smoke rc $? after $(( $(date +%s) - t0 )) s"; tail -25 $OUT/smoke.txt
echo "== paper, 100 steps, 4 jobs"
timeout -k 3 $(( 84 - ($(date +%s) - t0) )) python3 -m posenc compare --preset paper --seeds 1 --steps 100 --schemes shaw t5 rope rope+ntk:8 rope+dynamic alibi none clipped sinusoidal learned --jobs 4 --out $W/paper > $OUT/paper.txt 2>&1
echo "paper rc $? after $(( $(date +%s) - t0 )) s"; tail -40 $OUT/paper.txt
left=$(( 97 - ($(date +%s) - t0) ))
if [ $left -gt 14 ]; then
echo "== none alone, 100 steps, this process"
timeout -k 2 $left python3 -m posenc compare --preset paper --seeds 1 --steps 101 --schemes none --jobs 1 --out $W/alone > $OUT/alone.txt 2>&1
echo "alone rc $? after $(( $(date +%s) - t0 )) s"
fi
python3 - $W <<'P'
import glob, json, os, sys
for f in sorted(glob.glob(sys.argv[1] + "/*/cells/*.json"), key=os.path.getmtime):
    r = json.load(open(f)); run = f.split("/")[-3]; at = int(os.path.getmtime(f))
    if f.endswith("train.json"):
        s = r["settings"]
        print(at % 1000, run, s["task"], s["scheme"], "train", round(r["seconds"], 1), "s compile", round(r["compile_seconds"], 1), r["compile"][:300], "tok/s", r["tokens_per_second"] and round(r["tokens_per_second"]), "MB", r["memory"] and r["memory"] >> 20, r["curve"][-1], r["status"])
    else:
        s = r["settings"]
        print(at % 1000, run, s["training"]["task"], s["training"]["scheme"], s["testing"]["extension"], "test", round(r["seconds"], 1), "s", [(p["size"], round(p.get("loss", 0), 3), p.get("error", "")[:60]) for p in r["points"]])
P
kill $(cat $W/pid)
exit 0
