package gpus

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Name is how a setting names a GPU, without its "cuda:": NVML's index ("2"), or the UUID, or
// the beginning of one, of a GPU ("GPU-…") or of a part of one ("MIG-…").
type Name string

func (n Name) String() string { return prefix + string(n) }

// index returns NVML's index, if the name is one.
func (n Name) index() (int, bool) {
	i, err := strconv.Atoi(string(n))
	return i, err == nil
}

const (
	prefix   = "cuda:"
	maxNames = 1024
	maxName  = 96 // bytes
	mostGPUs = 999
)

// ParseNames reads "cuda:0,cuda:GPU-…". A GPU may be there more than once.
func ParseNames(text string) ([]Name, error) {
	var list []Name
	for part := range strings.SplitSeq(text, ",") {
		part = strings.TrimSpace(part)
		name, ok := strings.CutPrefix(part, prefix)
		if !ok || !valid(name) {
			return nil, fmt.Errorf("%q names no GPU: want cuda:2 (by nvidia-smi's index), cuda:GPU-… or cuda:MIG-… (by UUID: nvidia-smi -L)", clip(part))
		}
		if list = append(list, Name(name)); len(list) > maxNames {
			return nil, fmt.Errorf("more than %d GPUs", maxNames)
		}
	}
	return list, nil
}

// valid reports whether a name is an index, or begins like a UUID and has its characters.
func valid(name string) bool {
	if name != "" && strings.Trim(name, "0123456789") == "" {
		i, err := strconv.Atoi(name)
		return err == nil && i <= mostGPUs
	}
	if len(name) > maxName || !strings.HasPrefix(name, "GPU-") && !strings.HasPrefix(name, "MIG-") {
		return false
	}
	return !strings.ContainsFunc(name, func(r rune) bool {
		return (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && r != '-' && r != '/'
	})
}

func clip(s string) string {
	if len(s) > maxName {
		return strings.ToValidUTF8(s[:maxName], "") + "..."
	}
	return s
}

// Device is what the setting device says: the CPU, or a GPU.
type Device struct {
	Auto bool   // a GPU if one can be used, else the CPU
	CPU  bool   // the CPU
	GPUs []Name // the GPU of each rank; none: the first that CUDA shows, of one rank
}

// ParseDevice reads "auto", "cpu", "cuda", or what ParseNames reads.
func ParseDevice(text string) (Device, error) {
	switch text {
	case "auto":
		return Device{Auto: true}, nil
	case "cpu":
		return Device{CPU: true}, nil
	case "cuda":
		return Device{}, nil
	}
	if !strings.HasPrefix(text, prefix) {
		return Device{}, fmt.Errorf("%q is none of auto, cpu, cuda, cuda:INDEX and cuda:UUID", clip(text))
	}
	names, err := ParseNames(text)
	return Device{GPUs: names}, err
}

// Choice is which GPUs somebody wants. The zero Choice is none.
type Choice struct {
	All   bool
	Count int    // the first so many
	Names []Name // these; one that is there twice is for two workers
}

// ParseChoice reads "all", a number, or what ParseNames reads; "" is none.
func ParseChoice(text string) (c Choice, err error) {
	switch n, nerr := strconv.Atoi(text); {
	case text == "":
	case text == "all":
		c.All = true
	case nerr == nil && (n < 1 || n > mostGPUs):
		err = fmt.Errorf("%d GPUs: want 1 to %d", n, mostGPUs)
	case nerr == nil:
		c.Count = n
	case strings.Trim(text, ", ") == "":
		err = fmt.Errorf("%q names no GPU: want all, how many, or a list such as cuda:0,cuda:2", clip(text))
	case strings.Trim(text, "0123456789, ") == "":
		err = errors.New("a bare number is how many GPUs; to name them, write " + strings.ReplaceAll(prefix+clip(strings.ReplaceAll(text, " ", "")), ",", ","+prefix))
	default:
		c.Names, err = ParseNames(text)
	}
	return c, err
}
