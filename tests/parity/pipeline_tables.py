"""Prints a fingerprint of PyTorch's action tables of every pipeline schedule and shape, one line each:

    schedule ranks stages_per_rank microbatches fingerprint_of_compute fingerprint_of_compute_and_communication

tests/pipelining/pytorch_tables.txt is the output with PyTorch 2.13. A fingerprint is the upper half of the 64-bit
FNV-1a of the table as CSV. GPipe and 1F1B have no table with communication in PyTorch: "-".
"""

import sys

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.stage import _PipelineStageBase


class Stage(_PipelineStageBase):
    def __init__(self, index, ranks, stages, microbatches):
        self.stage_index, self.num_stages = index, stages
        self.group_size, self.group_rank, self.group = ranks, index % ranks, None
        self.chunks, self.submod, self.has_backward = microbatches, None, True
        self.stage_index_to_group_rank = generate_stage_to_rank_mapping(ranks, stages)


for abstract in list(Stage.__abstractmethods__):  # nothing of a stage runs here
    setattr(Stage, abstract, lambda self, *args, **kwargs: None)
Stage.__abstractmethods__ = frozenset()


def fingerprint(table):
    text = "".join(",".join(str(a or "") for a in table[rank]) + "\n" for rank in sorted(table))
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value >> 32:08x}", text


def tables(name, ranks, local, microbatches):
    kind = schedules.get_schedule_class(name)
    stages = [Stage(i * ranks, ranks, ranks * local, microbatches) for i in range(local)]
    if local == 1 and name in ("GPipe", "1F1B"):
        order = kind(stages[0], microbatches)._get_pipeline_order()
        if name == "1F1B":  # PyTorch 2.13 prints the forwards of the last rank from 1 on. It runs them from 0 on.
            order[ranks - 1] = [a._replace(microbatch_index=a.microbatch_index - 1) if a.computation_type == schedules.F
                                else a for a in order[ranks - 1]]
        return order, None
    schedule = kind(stages, microbatches)
    return schedule.pipeline_order, schedule.pipeline_order_with_comms


def main():
    show = sys.argv[1:]
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        locals_ = {"GPipe": [1], "1F1B": [1], "ZBVZeroBubble": [2], "DualPipeV": [2]}.get(name, [1, 2, 3, 4])
        for ranks in range(1, 9):
            for local in locals_:
                for microbatches in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24):
                    if show and show != [name, str(ranks), str(local), str(microbatches)]:
                        continue
                    try:
                        compute, comms = tables(name, ranks, local, microbatches)
                    except ValueError:
                        continue  # the schedule does not exist for this shape
                    if show:
                        print(fingerprint(compute)[1] + (fingerprint(comms)[1] if comms else ""), end="")
                        continue
                    print(name, ranks, local, microbatches, fingerprint(compute)[0],
                          fingerprint(comms)[0] if comms else "-")


main()
