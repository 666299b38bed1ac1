package gpustat

// Card is a GPU as NVML lists it. CUDA_VISIBLE_DEVICES does not change the list.
type Card struct {
	Index int    // NVML's, by bus id: what nvidia-smi shows. It is not CUDA's ordinal
	UUID  string // "GPU-…"
	Name  string // "NVIDIA H100 80GB HBM3"
	PCI   string // bus id as in sysfs, "0000:17:00.0"
	// Split says that the card is in MIG mode: CUDA runs on its Parts alone.
	Split bool
	Parts []Part
	Err   error // why nothing else is known of it, such as a GPU that is lost; nil: all is
}

// Part is a MIG instance of a Card.
type Part struct {
	UUID string // "MIG-…"
	Name string // "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
}
