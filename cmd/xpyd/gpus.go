package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/gpus"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/router/steer"
)

const gpusHelp = "GPUs for the workers, one for each rank: all, how many, or a list such as cuda:0,cuda:2, in which a GPU that is there twice is shared by two; default: all workers share the GPU of --device"

// placing gives each worker of an `up` with --gpus its GPUs, one a rank, as flags: these show in ps, and a
// worker that restarts has the same ones. It implements supervise.Seats.
type placing struct {
	seats  *gpus.Seats
	ranks  ranks
	memory float64 // part of a GPU's memory that all workers on it take
}

// Take implements supervise.Seats. The UUID names the GPU whatever happens to the others: indices
// move when a GPU is lost.
func (p *placing) Take(role, name string) ([]string, error) {
	list, err := p.seats.Take(role, name, p.ranks.of(fleet.Role(role)))
	if err != nil {
		return nil, err
	}
	own, part := map[string]int{}, 1.0 // seats that it has of each GPU
	var names []string
	for _, s := range list {
		own[s.UUID]++
		names = append(names, "cuda:"+s.UUID)
	}
	for _, s := range list {
		part = min(part, float64(own[s.UUID])/float64(s.Share))
	}
	args := []string{"--device", strings.Join(names, ",")}
	if part < 1 {
		args = append(args, "--gpu-memory", strconv.FormatFloat(p.memory*part, 'g', -1, 64))
	}
	return args, nil
}

// Give implements supervise.Seats.
func (p *placing) Give(name string) { p.seats.Give(name) }

// validGPUs checks --gpus without looking at the machine.
func (c *upConfig) validGPUs() error {
	if c.GPUs == "" {
		return nil
	}
	if _, err := gpus.ParseChoice(c.GPUs); err != nil {
		return config.Bad("gpus", "%v", err)
	}
	if c.Device != "auto" && c.Device != "cuda" {
		return config.Bad("gpus", "it and device %s exclude each other: it gives each worker its own", c.Device)
	}
	return nil
}

// machine is what place looks at.
type machine struct {
	list gpus.List
	env  func(string) (string, bool)
	sys  fs.FS
}

// place finds the GPUs of --gpus and sets how many workers of each role there are, if isSet says that
// this was not said. It returns nil without --gpus.
func (c *upConfig) place(m machine, isSet func(key string) bool) (*placing, error) {
	if c.GPUs == "" {
		return nil, nil
	}
	want, err := gpus.ParseChoice(c.GPUs)
	if err != nil {
		return nil, config.Bad("gpus", "%v", err)
	}
	found, err := gpus.Look(m.list, m.env)
	if errors.Is(err, gpus.ErrNone) {
		library, _ := m.env(cuda.LibraryEnv)
		err = fmt.Errorf("%w. %s. Without --gpus and --device the CPU serves", gpus.ErrNone, gpus.Lacks(m.list, library))
	}
	if err != nil {
		return nil, config.Bad("gpus", "%s: %v", c.GPUs, err)
	}
	list, err := found.Choose(want)
	if err != nil {
		return nil, config.Bad("gpus", "%v", err)
	}
	if len(list) == 1 && c.TensorParallel == (ranks{1, 1}) { // a pair needs two workers
		list = append(list, list[0])
	}
	if err := c.split(len(list), isSet("prefill"), isSet("decode")); err != nil {
		return nil, err
	}
	if least := c.TensorParallel.gpus(c.Planner.Prefill.Min, c.Planner.Decode.Min); c.Planner.Mode == steer.Act && least > len(list) {
		return nil, config.Bad("gpus", "planner.prefill.min and planner.decode.min are workers for %d GPUs together, and there are %d", least, len(list))
	}
	p := &placing{gpus.NewSeats(list, func(pci string) int { return gpus.NodeOf(m.sys, pci) }), c.TensorParallel, c.GPUMemory}
	p.bound(&c.RouterConfig)
	return p, nil
}

// bound keeps a planner that acts from wanting more GPUs than there are seats.
func (p *placing) bound(c *RouterConfig) {
	if p != nil && c.Planner.Mode == steer.Act {
		c.Planner.Budget = min(c.Planner.Budget, p.seats.Len())
	}
}

// split sets the numbers of workers that were not given, for so many seats: half of them prefill, and
// the odd one decode; where one number is given, the other role has the rest.
func (c *upConfig) split(seats int, prefill, decode bool) error {
	tp := c.TensorParallel
	if !prefill && !decode {
		c.Prefill, prefill = max(seats/2/tp.Prefill, 1), true
	}
	switch {
	case !prefill:
		c.Prefill = max((seats-tp.gpus(0, c.Decode))/tp.Prefill, 1)
	case !decode:
		c.Decode = max((seats-tp.gpus(c.Prefill, 0))/tp.Decode, 1)
	}
	if c.Prefill > maxWorkers || c.Decode > maxWorkers {
		return config.Bad("gpus", "%d are for more than %d workers of a role, the most: say how many with prefill and decode", seats, maxWorkers)
	}
	if n := tp.gpus(c.Prefill, c.Decode); n > seats {
		return config.Bad("gpus", "%s: %d prefill and %d decode workers with tensor_parallel %s take %d GPUs, and there is room for %d: to have two ranks share a GPU, name it twice, as in cuda:0,cuda:0,cuda:1",
			c.GPUs, c.Prefill, c.Decode, tp, n, seats)
	}
	return nil
}

// thisMachine is what a running `up` looks at.
func thisMachine(list gpus.List) machine { return machine{list, os.LookupEnv, os.DirFS("/sys")} }

// hint is a line for whoever has several GPUs and uses one, because no more was said.
func (c *upConfig) hint(m machine) string {
	if c.GPUs != "" || strings.HasPrefix(c.Device, "cuda:") {
		return ""
	}
	found, err := gpus.Look(m.list, m.env)
	if err != nil || len(found.Visible()) < 2 {
		return ""
	}
	return fmt.Sprintf("all workers share one of %d GPUs; with --gpus all each has its own\n", len(found.Visible()))
}
