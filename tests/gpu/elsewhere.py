"""Run code for a GPU without one: tensors go to another device, tiles are those of the GPU."""

import torch
from torch.overrides import TorchFunctionMode

PROCESSORS = {80: 108, 86: 82, 89: 128, 90: 132, 100: 148, 120: 170}


class Elsewhere(TorchFunctionMode):
    """Every tensor that is made on or moved to "cuda" goes to this device."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0].to(self.device)
        kwargs = {name: self.moved(x) for name, x in (kwargs or {}).items()}
        return function(*map(self.moved, args), **kwargs)

    def moved(self, x):
        is_cuda = (isinstance(x, str) and x.startswith("cuda")) or (isinstance(x, torch.device) and x.type == "cuda")
        return torch.device(self.device) if is_cuda else x


def use_tiles_of(arch: int) -> None:
    """Make the engine choose its tiles as on a GPU of this architecture, wherever tensors are."""
    from posenc.engines import triton as engine
    from posenc.engines.triton import decode_schedule, schedule

    class Properties:
        multi_processor_count = PROCESSORS[arch]

    torch.cuda.get_device_capability = lambda device=None: divmod(arch, 10)
    torch.cuda.get_device_properties = lambda device=None: Properties
    engine.INTERPRETED = True
    cuda = torch.device("cuda")

    def on_cuda(chosen):
        def choose(*args, **options):
            return chosen(*(cuda if isinstance(x, torch.device) else x for x in args), **options)

        return choose

    choices = (
        "choose_tile",
        "choose_band_tile",
        "choose_states_tile",
        "choose_table_tile",
        "choose_row_step",
        "choose_splits",
    )
    for name in choices:
        setattr(schedule, name, on_cuda(getattr(schedule, name)))
    for name in ("choose_decode_tile", "choose_decode_shares"):
        setattr(decode_schedule, name, on_cuda(getattr(decode_schedule, name)))
