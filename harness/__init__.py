"""The judge. A case goes through five files, in this order: spec, golden, run, compare, report.

one case   spec       a TOML file becomes Spec and Case; nothing else knows the format
           golden     the oracle's inputs and expected values; manifest: what is committed of it
                      vacuity: would a kernel that ignores an input pass?
           run        two runs become a verdict; launch: one of them, and what is looked at;
                      memory: poison and guard bands; alarm: a limit for what may never end
           compare    exact, ulp or a derived bound
           report     verdicts as text, JSON and a page; merge: several reports into one
all cases  stages     the gate: a pytest session a stage, reconciled with what was asked for
           orphans    what a launcher leaves running ends with the gate
           plugin     pytest hooks; seat: what a process may use; controller: leases, verdicts
           devices    GPUs and their leases; probe: what the driver says; doctor: what follows
evidence   sources    the files behind a verdict; receipts: what a GPU passed from them
           mutants    faults to plant; mutate: judge them (nursery: each in its process)
           mutate_gpu     and once more on a GPU
           certificates   what came of it, and how it stands
           fuzz       cases drawn inside a spec's ranges
speed      bench      against floor, peers and baseline; bench_case, bench_clock: one case
           bench_items, bench_goldens, peers, bench_compare, bench_report
commands   cli        gate, golden, receipts, doctor, compile, report; console: what all share
           cli_bundle, cli_decode, cli_forward, cli_fuzz, cli_mutate, cli_quant
"""
