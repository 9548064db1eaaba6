"""Floor 5: runs any proved schedule on torch.distributed. Nothing here knows a schedule's name."""
