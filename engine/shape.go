package engine

import (
	"fmt"
	"slices"

	"github.com/xpyd/xpyd/kernels"
)

// What a request keeps from being drawn: EOS and stop tokens before MinTokens and what would complete a
// bad word, as kernels.Sample.Ban takes it, and all that is not Allowed, as a mask.

// bans is made by the loop at a handle's first draw: those that wait need none.
type bans struct {
	made     bool
	allowed  []uint32  // as kernels.Sample.Mask has it; nil: anything is
	unlisted []int32   // EOS that is not Allowed, where something is
	always   []int32   // a bad word by itself
	early    []int32   // these, EOS and stop tokens
	words    [][]int32 // of several tokens
}

// readsOutput reports whether a draw depends on more of the output than its length.
func (r *Request) readsOutput() bool {
	return r.Repetition != 1 || r.Presence != 0 || r.Frequency != 0 || slices.ContainsFunc(r.BadWords, func(w []int32) bool { return len(w) > 1 })
}

// shape makes what does not depend on the output.
func (h *Handle) shape() *bans {
	b, r := &h.bans, h.req
	if b.made {
		return b
	}
	b.made = true
	if len(r.Allowed) > 0 {
		b.allowed = make([]uint32, kernels.MaskWords(h.e.vocab))
		for _, id := range r.Allowed {
			b.allowed[id/32] |= 1 << (id % 32)
		}
		for _, id := range h.e.cfg.EOS {
			if !slices.Contains(r.Allowed, id) {
				b.unlisted = append(b.unlisted, id)
			}
		}
	}
	for _, w := range r.BadWords {
		if len(w) == 1 {
			b.always = append(b.always, w[0])
		} else {
			b.words = append(b.words, w)
		}
	}
	b.early = h.allBanned
	if len(b.always) > 0 {
		b.early = slices.Concat(b.always, h.allBanned)
	}
	return b
}

// banned is what the draw behind so many drafts must not yield; output has the drafts, if it matters. ends:
// MinTokens counts, which a mask overrules.
func (q *sequence) banned(ends bool, drafts int, output []int32) []int32 {
	r, b := q.h.req, q.h.shape()
	list := b.always
	if ends && q.length()+drafts-len(r.Prompt) < r.MinTokens {
		list = b.early
	}
	from := len(list)
	for _, w := range b.words {
		if last := len(w) - 1; last <= len(output) && slices.Equal(output[len(output)-last:], w[:last]) {
			if len(list) == from { // those before are the request's
				list = slices.Clone(list)
			}
			list = append(list, w[last])
		}
	}
	if len(list) > from && len(r.Allowed) > 0 && !leaves(r.Allowed, list) {
		return list[:from] // something must be drawn
	}
	return list
}

// leaves reports whether some id is not in banned.
func leaves(ids, banned []int32) bool {
	in := make(map[int32]bool, len(ids))
	for _, id := range ids {
		in[id] = true
	}
	for _, id := range banned {
		delete(in, id)
	}
	return len(in) > 0
}

// checkShape refuses what no draw could satisfy, and token ids that the model does not have.
func (e *Engine) checkShape(r *Request) *RequestError {
	for _, list := range []struct {
		field string
		ids   [][]int32
	}{{"allowed_token_ids", [][]int32{r.Allowed}}, {"logprob_token_ids", [][]int32{r.LogprobIDs}}, {"bad_words", r.BadWords}} {
		for _, ids := range list.ids {
			if id, ok := e.outside(ids); ok {
				return &RequestError{Field: list.field, Msg: fmt.Sprintf("token %d is outside the vocabulary of %d", id, e.vocab)}
			}
		}
	}
	if slices.ContainsFunc(r.BadWords, func(w []int32) bool { return len(w) == 0 }) {
		return &RequestError{Field: "bad_words", Msg: "has a word without tokens"}
	}
	if len(r.Allowed) == 0 {
		return nil
	}
	var never []int32
	for _, w := range r.BadWords {
		if len(w) == 1 {
			never = append(never, w[0])
		}
	}
	if !leaves(r.Allowed, never) {
		return &RequestError{Field: "allowed_token_ids", Msg: "has nothing that bad_words allows"}
	}
	if r.MinTokens > 0 && !leaves(r.Allowed, slices.Concat(never, e.cfg.EOS, r.StopTokens)) {
		return &RequestError{Field: "allowed_token_ids", Msg: "has nothing that may come before min_tokens"}
	}
	return nil
}

// listed is how many top entries the device lists with a draw: all, if some of them were asked for.
func (e *Engine) told(r *Request) int {
	if r.Logprobs >= 0 && len(r.LogprobIDs) > 0 {
		return e.vocab
	}
	return r.Logprobs
}

// own returns a copy of a draw, with the log probabilities that the request asked for.
func own(r *Request, s kernels.Sampled) kernels.Sampled {
	if len(r.LogprobIDs) == 0 || len(s.Top) == 0 {
		s.Top = slices.Clone(s.Top)
		return s
	}
	at := make(map[int32]kernels.TokenLogprob, len(r.LogprobIDs))
	for _, id := range r.LogprobIDs {
		at[id] = kernels.TokenLogprob{ID: -1}
	}
	for _, t := range s.Top {
		if _, wanted := at[t.ID]; wanted {
			at[t.ID] = t
		}
	}
	top := make([]kernels.TokenLogprob, 0, len(at)+1)
	if _, wanted := at[s.Token]; !wanted {
		top = append(top, s.Self)
	}
	for _, id := range r.LogprobIDs {
		if t, once := at[id]; once && t.ID >= 0 {
			top = append(top, t)
			delete(at, id)
		}
	}
	s.Top = top
	return s
}
