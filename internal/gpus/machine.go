// Package gpus says which GPU is which, hands GPUs out to workers, and knows what is near them.
//
// A GPU has several names: NVML's index, which nvidia-smi shows and which here is the index; its
// UUID; its PCI bus id; and CUDA's ordinal, which depends on CUDA_VISIBLE_DEVICES and
// CUDA_DEVICE_ORDER. People write an index or a UUID. From then on the UUID counts: a process
// that is given a GPU shows CUDA that one alone (CUDA_VISIBLE_DEVICES=UUID, set in the process
// before it opens CUDA), so ordinals play no part, and a part of a GPU (MIG), which CUDA takes in
// no other way, needs no rule of its own. The bus id that CUDA then tells is compared with
// NVML's.
//
// NVML is a List, for which gpustest has a fake; sysfs is an fs.FS.
package gpus

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/xpyd/xpyd/internal/gpustat"
)

// GPU is what a worker can be put on: a GPU, or a part of one in MIG mode.
type GPU struct {
	Index int    // NVML's; of a part that of its GPU
	UUID  string // "GPU-…" or "MIG-…"
	Model string // "NVIDIA H100 80GB HBM3"
	PCI   string // bus id, "0000:17:00.0"; of a part that of its GPU
}

// Part reports whether it is a part of a GPU.
func (g GPU) Part() bool { return strings.HasPrefix(g.UUID, "MIG-") }

// String names it as a setting does.
func (g GPU) String() string {
	if g.Part() {
		return prefix + g.UUID
	}
	return prefix + strconv.Itoa(g.Index)
}

// List lists a machine's GPUs: gpustat.Cards.
type List func() ([]gpustat.Card, error)

// Variables that say which GPUs CUDA shows a process, and in which order.
const (
	VisibleEnv = "CUDA_VISIBLE_DEVICES"
	orderEnv   = "CUDA_DEVICE_ORDER"
)

// Machine is a machine's GPUs, and which of them this process may use.
type Machine struct {
	cards   []gpustat.Card
	visible []GPU  // in CUDA's order
	by      string // the VisibleEnv that hides the others; "": none does
}

// ErrNone says that there is no GPU, or no NVML to ask. Lacks says more.
var ErrNone = errors.New("no GPU is found")

// Look asks NVML for the GPUs and the environment (os.LookupEnv) for those that it hides. No GPU at
// all is ErrNone.
func Look(list List, env func(string) (string, bool)) (*Machine, error) {
	cards, err := list()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNone, err)
	}
	if len(cards) == 0 {
		return nil, ErrNone
	}
	m := &Machine{cards: cards}
	show, set := env(VisibleEnv)
	if !set {
		for i := range cards {
			m.visible = append(m.visible, usable(&cards[i])...)
		}
		return m, nil
	}
	m.by = VisibleEnv + "=" + clip(show)
	order, _ := env(orderEnv)
	return m, m.show(show, order)
}

// usable are what CUDA can run on of a card: itself, or its parts.
func usable(c *gpustat.Card) (list []GPU) {
	switch {
	case c.Err != nil:
	case c.Split:
		for _, p := range c.Parts {
			list = append(list, GPU{c.Index, p.UUID, p.Name, c.PCI})
		}
	default:
		list = []GPU{{c.Index, c.UUID, c.Name, c.PCI}}
	}
	return list
}

// show makes visible what CUDA_VISIBLE_DEVICES says: indices and beginnings of UUIDs, as far as the
// first that is wrong.
func (m *Machine) show(text, order string) error {
	var counted []*gpustat.Card // by CUDA, which leaves out those that it may not use, as a batch system's job has them
	for i := range m.cards {
		if m.cards[i].Err == nil {
			counted = append(counted, &m.cards[i])
		}
	}
	for entry := range strings.SplitSeq(text, ",") {
		entry = strings.TrimSpace(entry)
		i, err := strconv.Atoi(entry)
		var found []GPU
		switch {
		case err == nil && (i < 0 || i >= len(counted)):
		case err == nil:
			if order != "PCI_BUS_ID" && mixed(counted) {
				return fmt.Errorf("%s numbers GPUs of different models by their speed, which NVML does not know: set %s=PCI_BUS_ID, or name them by UUID there", m.by, orderEnv)
			}
			found = usable(counted[i])
		default:
			found, _ = m.begin(entry)
		}
		if len(found) == 0 {
			return nil
		}
		for _, g := range found {
			if !slices.Contains(m.visible, g) {
				m.visible = append(m.visible, g)
			}
		}
	}
	return nil
}

// mixed reports whether there are several models. Then CUDA's default order is not NVML's.
func mixed(cards []*gpustat.Card) bool {
	return slices.ContainsFunc(cards, func(c *gpustat.Card) bool { return c.Name != cards[0].Name })
}

// begin finds the GPU or part whose UUID begins so; the GPU's own UUID stands for all of its parts.
func (m *Machine) begin(uuid string) (found []GPU, err error) {
	if len(uuid) <= len("GPU-") { // or it would be any
		return nil, nil
	}
	hits := 0
	for i := range m.cards {
		c := &m.cards[i]
		all := usable(c)
		if c.UUID != "" && strings.HasPrefix(c.UUID, uuid) {
			found, hits = all, hits+1
			continue
		}
		for _, g := range all {
			if strings.HasPrefix(g.UUID, uuid) {
				found, hits = []GPU{g}, hits+1
			}
		}
	}
	if hits > 1 {
		return nil, errors.New("several GPUs have UUIDs that begin so; write more of it")
	}
	return found, nil
}

// Visible are the GPUs that this process may use, in CUDA's order.
func (m *Machine) Visible() []GPU { return slices.Clone(m.visible) }

// Find returns the GPU of that name, or an error that says what there is.
func (m *Machine) Find(n Name) (GPU, error) {
	var found []GPU
	var card *gpustat.Card // that n names as a whole
	if i, ok := n.index(); ok {
		if i >= len(m.cards) {
			return GPU{}, fmt.Errorf("%s: there is no such GPU; %s", n, m.says())
		}
		card = &m.cards[i]
		found = usable(card)
	} else {
		var err error
		if found, err = m.begin(string(n)); err != nil {
			return GPU{}, fmt.Errorf("%s: %w", n, err)
		}
		if at := slices.IndexFunc(m.cards, func(c gpustat.Card) bool { return c.UUID != "" && strings.HasPrefix(c.UUID, string(n)) }); at >= 0 {
			card = &m.cards[at]
		}
	}
	switch {
	case card != nil && card.Err != nil:
		return GPU{}, fmt.Errorf("%s: %w", n, card.Err)
	case card != nil && card.Split && len(found) == 0:
		return GPU{}, fmt.Errorf("%s is in MIG mode and has no parts: make some, or end the mode (nvidia-smi mig)", n)
	case card != nil && card.Split:
		return GPU{}, fmt.Errorf("%s is split (MIG): name one of its parts, %s", n, join(found))
	case len(found) == 0:
		return GPU{}, fmt.Errorf("%s: no GPU has this UUID; %s (nvidia-smi -L lists UUIDs)", n, m.says())
	case !slices.Contains(m.visible, found[0]):
		return GPU{}, fmt.Errorf("%s: %s hides it; %s", n, m.by, m.says())
	}
	return found[0], nil
}

// Choose returns the GPUs that somebody wants, or an error that says what there is.
func (m *Machine) Choose(c Choice) ([]GPU, error) {
	switch {
	case c.All && len(m.visible) == 0:
		return nil, errors.New(m.says())
	case c.All:
		return m.Visible(), nil
	case c.Count > len(m.visible):
		return nil, fmt.Errorf("%d GPUs are too many: %s", c.Count, m.says())
	case c.Count > 0:
		return m.Visible()[:c.Count], nil
	}
	var list []GPU
	for _, n := range c.Names {
		g, err := m.Find(n)
		if err != nil {
			return nil, err
		}
		list = append(list, g)
	}
	return list, nil
}

// At returns the visible GPU with that bus id, in CUDA's or NVML's form. Of one with several visible
// parts it is not known which; then there is no UUID.
func (m *Machine) At(pci string) (g GPU, ok bool) {
	for _, v := range m.visible {
		if !SamePCI(v.PCI, pci) {
			continue
		}
		if ok {
			g.UUID = ""
			return g, true
		}
		g, ok = v, true
	}
	return g, ok
}

// SamePCI compares bus ids, of which CUDA and NVML write the domain in four or eight digits, and
// letters large or small.
func SamePCI(a, b string) bool {
	short := func(s string) string {
		s = strings.ToLower(s)
		if d, rest, ok := strings.Cut(s, ":"); ok {
			return strings.TrimLeft(d, "0") + ":" + rest
		}
		return s
	}
	return a != "" && short(a) == short(b)
}

// says what there is, for errors.
func (m *Machine) says() string {
	if len(m.visible) == 0 && m.by != "" {
		return m.by + " hides every GPU"
	}
	if len(m.visible) == 0 {
		for i := range m.cards {
			if err := m.cards[i].Err; err != nil {
				return fmt.Sprintf("there is no GPU that CUDA can run on (cuda:%d: %v)", i, err)
			}
		}
		return "there is no GPU that CUDA can run on"
	}
	text := "there are "
	if m.by != "" {
		text = "it leaves "
	}
	text += join(m.visible)
	if !slices.ContainsFunc(m.visible, func(g GPU) bool { return g.Model != m.visible[0].Model }) {
		text += " (" + m.visible[0].Model + ")"
	}
	return text
}

func join(list []GPU) string {
	var names []string
	for _, g := range list {
		names = append(names, g.String())
	}
	return strings.Join(names, ", ")
}
