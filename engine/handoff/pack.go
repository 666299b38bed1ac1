package handoff

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"

	"github.com/xpyd/xpyd/kernels"
)

// PromptLogprobs are a prompt's log probabilities. In JSON they are a string of packed bytes, a
// quarter of the size of plain JSON: a commit is bounded.
type PromptLogprobs []kernels.PromptLogprob

// MarshalJSON implements json.Marshaler.
func (p PromptLogprobs) MarshalJSON() ([]byte, error) { return json.Marshal(pack(p)) }

// UnmarshalJSON implements json.Unmarshaler.
func (p *PromptLogprobs) UnmarshalJSON(text []byte) (err error) {
	var b []byte
	if err = json.Unmarshal(text, &b); err == nil {
		*p, err = unpack(b)
	}
	return err
}

// packedEntry is the size of an entry: id u32, logprob f32, rank u32, little-endian. A position is
// the number of top entries, u32, then its own entry, then the top ones.
const packedEntry = 12

func pack(list []kernels.PromptLogprob) []byte {
	var b []byte
	u32 := func(v uint32) { b = binary.LittleEndian.AppendUint32(b, v) }
	entry := func(t *kernels.TokenLogprob) {
		u32(uint32(t.ID))
		u32(math.Float32bits(t.Logprob))
		u32(uint32(t.Rank))
	}
	for i := range list {
		p := &list[i]
		u32(uint32(len(p.Top)))
		entry(&p.Self)
		for j := range p.Top {
			entry(&p.Top[j])
		}
	}
	return b
}

func unpack(b []byte) ([]kernels.PromptLogprob, error) {
	u32 := func() uint32 {
		v := binary.LittleEndian.Uint32(b)
		b = b[4:]
		return v
	}
	entry := func() kernels.TokenLogprob {
		return kernels.TokenLogprob{ID: int32(u32()), Logprob: math.Float32frombits(u32()), Rank: int32(u32())}
	}
	var list []kernels.PromptLogprob
	for len(b) > 0 {
		if len(b) < 4+packedEntry || uint64(binary.LittleEndian.Uint32(b)) > uint64(len(b)-4-packedEntry)/packedEntry {
			return nil, errors.New("packed log probabilities are cut off")
		}
		n := u32()
		p := kernels.PromptLogprob{Self: entry()}
		if n > 0 {
			p.Top = make([]kernels.TokenLogprob, n)
		}
		for i := range p.Top {
			p.Top[i] = entry()
		}
		list = append(list, p)
	}
	return list, nil
}
