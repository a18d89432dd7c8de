# about 170 s; timing-sensitive (at the end). FlexAttention forms of t5 and shaw.
set -u
export PYTHONUNBUFFERED=1
cp .peers/benchflex.py . || true
for n in 0 1 2 3 4 5 6 7 8 9 10 11 12; do timeout 100 python3 benchflex.py warm $n > $OUT/warm$n.tmp 2>&1 & done
wait
cat $OUT/warm*.tmp | grep -v Warning | tail -40 > $OUT/warm.txt; rm -f $OUT/warm*.tmp
timeout 65 python3 benchflex.py 2>$OUT/err.txt | tee $OUT/flex.jsonl
tail -c 3000 $OUT/err.txt > $OUT/err_tail.txt; rm -f $OUT/err.txt
