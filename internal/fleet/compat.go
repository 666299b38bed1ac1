package fleet

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/xpyd/xpyd/kvlayout"
)

// Mismatch is the first difference that keeps a prefill and a decode instance apart.
type Mismatch struct {
	Field   string `json:"field"`
	Prefill string `json:"prefill"`
	Decode  string `json:"decode"`
}

// Error implements error.
func (m *Mismatch) Error() string {
	return fmt.Sprintf("%s differs: prefill has %s, decode has %s", m.Field, m.Prefill, m.Decode)
}

// Native is the dialect of our own workers; router/dialect has all.
const Native = "native"

// Alone reports whether the instance serves whole requests, without a partner.
func (i *Instance) Alone() bool { return i.Dialect == "openai" }

// Compatible returns nil if the KV blocks of p can serve requests on d, else the first
// difference. Only SGLang's block sizes must be equal, because kvconn converts others. As in
// kvconn's handshake, dtype and numerics may differ if both sides allow conversion. A member
// without secrets pairs only with others without.
func Compatible(p, d *Instance) *Mismatch {
	diff := func(field, prefill, decode string) *Mismatch {
		return &Mismatch{Field: field, Prefill: shown(prefill), Decode: shown(decode)}
	}
	num := func(field string, prefill, decode int) *Mismatch {
		return diff(field, strconv.Itoa(prefill), strconv.Itoa(decode))
	}
	a, b := &p.Layout, &d.Layout
	layout, converts := compareLayouts(p, d)
	switch {
	case p.Dialect != d.Dialect:
		return diff("dialect", p.Dialect, d.Dialect)
	case !shareSecret(p.Secrets, d.Secrets):
		return diff("fleet_secret", p.Secrets, d.Secrets)
	case p.Model != d.Model:
		return diff("model", p.Model, d.Model)
	case p.Version != d.Version && p.Version != "" && d.Version != "":
		return diff("version", p.Version, d.Version)
	case p.ModelFingerprint != d.ModelFingerprint:
		return diff("model_fingerprint", p.ModelFingerprint, d.ModelFingerprint)
	case p.TokenizerFingerprint != d.TokenizerFingerprint:
		return diff("tokenizer_fingerprint", p.TokenizerFingerprint, d.TokenizerFingerprint)
	case p.Numerics != d.Numerics && !converts:
		return diff("numerics", p.Numerics, d.Numerics)
	case p.Parsers != d.Parsers && p.Parsers != "" && d.Parsers != "": // roles change, and streams move
		return diff("parsers", p.Parsers, d.Parsers)
	case p.ProtocolMin > d.ProtocolMax || d.ProtocolMin > p.ProtocolMax:
		return diff("protocol", span(p), span(d))
	case layout != nil: // after protocol: other protocols may announce it otherwise
		return layout
	case p.Dialect == "sglang" && a.BlockTokens != b.BlockTokens && a.BlockTokens > 0 && b.BlockTokens > 0:
		return num("layout.block_tokens", a.BlockTokens, b.BlockTokens) // decode would fail
	}
	return nil
}

// compareLayouts returns a difference that is neither the block size nor converted, and
// whether rows are converted.
func compareLayouts(p, d *Instance) (m *Mismatch, converts bool) {
	if p.Layout.Groups == d.Layout.Groups {
		return nil, false
	}
	a, err := p.Layout.Layout()
	b, err2 := d.Layout.Layout()
	if err != nil || err2 != nil { // a foreign engine beside a native one
		return &Mismatch{"layout.groups", shown(clip(string(p.Layout.Groups))), shown(clip(string(d.Layout.Groups)))}, false
	}
	convert := p.Convert && d.Convert
	if field, x, y := kvlayout.Compare(a, b, convert); field != "" {
		m = &Mismatch{"layout." + field, x, y}
	}
	return m, convert && kvlayout.Differ(a, b)
}

// shareSecret reports whether two members have a secret in common, or none at all.
func shareSecret(a, b string) bool {
	if a == b {
		return true
	}
	for id := range strings.SplitSeq(a, "+") {
		if id != "" && slices.Contains(strings.Split(b, "+"), id) {
			return true
		}
	}
	return false
}

func span(i *Instance) string { return fmt.Sprintf("%d-%d", i.ProtocolMin, i.ProtocolMax) }

func shown(v string) string {
	if v == "" {
		return "(none)"
	}
	return v
}

// Traits is all of an instance that Compatible compares.
type Traits struct {
	Role                                                      Role
	Dialect, Model, Version, Secrets                          string
	ModelFingerprint, TokenizerFingerprint, Numerics, Parsers string
	Layout                                                    kvlayout.Form
	Convert                                                   bool
	ProtocolMin, ProtocolMax                                  int
}

// Traits returns the instance's.
func (i *Instance) Traits() Traits {
	return Traits{i.Role, i.Dialect, i.Model, i.Version, i.Secrets, i.ModelFingerprint, i.TokenizerFingerprint, i.Numerics, i.Parsers,
		i.Layout, i.Convert, i.ProtocolMin, i.ProtocolMax}
}

// Refusal is a live member that is incompatible with all or most of its counterparts.
type Refusal struct {
	ID       string   `json:"id"`
	Role     Role     `json:"role"`
	Against  string   `json:"against"` // a counterpart with that difference
	Mismatch Mismatch `json:"mismatch"`
	Refused  int      `json:"refused"` // incompatible counterparts
	Of       int      `json:"of"`      // live counterparts
}

func (r Refusal) String() string {
	return fmt.Sprintf("%s %s cannot be paired with %d of %d, such as %s: %s",
		r.Role, r.ID, r.Refused, r.Of, r.Against, r.Mismatch.Error())
}

// Refusals lists, by ID, every live member that is incompatible with more than half of its
// counterparts, with its most frequent difference. Members without counterparts, or with some
// only in other dialects than theirs, are left out. It is not for the request path.
func (s *Snapshot) Refusals() []Refusal {
	classes := s.classes()
	var out []Refusal
	for i := range s.Members {
		if m := &s.Members[i]; m.State == Live && !m.Alone() {
			if r := m.refusal(classes); 2*r.Refused > r.Of {
				out = append(out, r)
			}
		}
	}
	return out
}

// class is all live members that Compatible cannot tell apart. A fleet has few of them.
type class struct {
	*Member // the first by ID
	size    int
}

func (s *Snapshot) classes() []*class {
	byTraits := map[Traits]*class{}
	var out []*class
	for i := range s.Members {
		m := &s.Members[i]
		if m.State != Live {
			continue
		}
		key := m.Traits()
		if m.Dialect != "sglang" {
			key.Layout.BlockTokens = 0
		}
		c := byTraits[key]
		if c == nil {
			c = &class{Member: m}
			byTraits[key] = c
			out = append(out, c)
		}
		c.size++
	}
	return out
}

func (m *Member) refusal(classes []*class) Refusal {
	r := Refusal{ID: m.ID, Role: m.Role}
	seen := map[Mismatch]int{}
	kin := slices.ContainsFunc(classes, func(c *class) bool { return c.Role != m.Role && c.Dialect == m.Dialect })
	for _, c := range classes {
		if c.Role == m.Role || c.Alone() || kin && c.Dialect != m.Dialect {
			continue // another dialect matters only to a member without its own kind
		}
		r.Of += c.size
		p, d := &m.Instance, &c.Instance
		if m.Role == Decode {
			p, d = d, p
		}
		diff := Compatible(p, d)
		if diff == nil {
			continue
		}
		r.Refused += c.size
		if seen[*diff] += c.size; r.Against == "" || seen[*diff] > seen[r.Mismatch] {
			r.Against, r.Mismatch = c.ID, *diff
		}
	}
	return r
}
