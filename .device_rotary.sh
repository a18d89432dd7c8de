# about 80 seconds, timing-sensitive: turning q and k beside a copy: a sweep of the kernel's shape, then every case
export PYTHONPATH=src:.
timeout 60 python -m pytest -q -x -p no:cacheprovider tests/test_rotation_kernel.py -m gpu > $OUT/pytest.txt 2>&1 || true
tail -3 $OUT/pytest.txt
timeout 110 python -m bench.rotate --sweep --out $OUT/sweep.json 2>&1 | tee $OUT/sweep.txt || true
timeout 80 python -m bench.rotate --out $OUT/rotate.json 2>&1 | tee $OUT/rotate.txt || true
