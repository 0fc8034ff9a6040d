"""`recipes reproduce`: trains an old run again, compares both bit by bit, and publishes runs.

Only a run that saved its code can be reproduced. What a run saves is in
`common.run_directory.provenance`.
"""
