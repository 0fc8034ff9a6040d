"""The records that an observed run writes. A record is a JSON object on its own line.

Each rank of each launch writes its own file, `launch-0-rank-0.jsonl`. A run that is interrupted and
resumed has several launches. Digests are short SHA-256 sums: equal digests mean equal bits.

The records of a file are in the order of time. So the first record in which two runs differ shows
where they began to differ.
"""
