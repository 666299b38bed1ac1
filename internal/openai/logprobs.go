package openai

import (
	"slices"
	"strconv"
)

// tokenText is how log probabilities name a token.
func (e *Encoder) tokenText(id int32) string {
	if e.asIDs {
		return "token_id:" + strconv.Itoa(int(id))
	}
	return e.vocab.TokenText(id)
}

// appendTextLogprobs writes the completions shape: parallel lists, echo's entries first.
func (e *Encoder) appendTextLogprobs(dst []byte, echo, lps []TokenLogprob) []byte {
	if lps == nil {
		return append(dst, "null"...)
	}
	list := func(dst []byte, name string, item func(dst []byte, lp *TokenLogprob) []byte) []byte {
		dst = append(dst, name...)
		n := 0
		for _, part := range [2][]TokenLogprob{echo, lps} {
			for i := range part {
				dst = e.put(item(comma(dst, n), &part[i]))
				n++
			}
		}
		return append(dst, ']')
	}
	dst = list(dst, `{"text_offset":[`, func(dst []byte, lp *TokenLogprob) []byte {
		return strconv.AppendInt(dst, int64(lp.Offset), 10)
	})
	dst = list(dst, `,"token_logprobs":[`, func(dst []byte, lp *TokenLogprob) []byte {
		if lp.None {
			return append(dst, "null"...)
		}
		return appendLogprob(dst, lp.Logprob)
	})
	dst = list(dst, `,"tokens":[`, func(dst []byte, lp *TokenLogprob) []byte {
		return AppendString(dst, e.tokenText(lp.ID))
	})
	dst = list(dst, `,"top_logprobs":[`, e.appendTopMap)
	return append(dst, '}')
}

// appendTopMap writes {token: logprob}, the chosen token first, then the
// alternatives. Of tokens with the same text the first wins.
func (e *Encoder) appendTopMap(dst []byte, lp *TokenLogprob) []byte {
	if lp.None {
		return append(dst, "null"...)
	}
	self := e.tokenText(lp.ID)
	dst = append(dst, '{')
	dst = AppendString(dst, self)
	dst = append(dst, ':')
	dst = appendLogprob(dst, lp.Logprob)
	var space [32]string
	seen := append(space[:0], self)
	for i := range lp.Top {
		t := &lp.Top[i]
		text := e.tokenText(t.ID)
		if slices.Contains(seen, text) {
			continue
		}
		seen = append(seen, text)
		dst = append(dst, ',')
		dst = AppendString(dst, text)
		dst = append(dst, ':')
		dst = appendLogprob(dst, t.Logprob)
	}
	return append(dst, '}')
}

// appendChatLogprobs writes the chat shape: {"content":[{…}],"refusal":null}.
func (e *Encoder) appendChatLogprobs(dst []byte, lps []TokenLogprob) []byte {
	if lps == nil {
		return append(dst, "null"...)
	}
	dst = append(dst, `{"content":[`...)
	for i := range lps {
		dst = comma(dst, i)
		dst = e.put(e.appendEntry(dst, &lps[i].TopLogprob))
		dst = append(dst, `,"top_logprobs":[`...)
		for j := range lps[i].Top {
			dst = comma(dst, j)
			dst = append(e.appendEntry(dst, &lps[i].Top[j]), '}')
		}
		dst = append(dst, `]}`...)
	}
	return append(dst, `],"refusal":null}`...)
}

// appendEntry writes {"token","logprob","bytes" and leaves the brace open.
func (e *Encoder) appendEntry(dst []byte, t *TopLogprob) []byte {
	dst = appendStr(dst, `{"token":`, e.tokenText(t.ID))
	dst = append(dst, `,"logprob":`...)
	dst = appendLogprob(dst, t.Logprob)
	dst = append(dst, `,"bytes":`...)
	raw := e.vocab.TokenBytes(t.ID)
	if raw == nil {
		return append(dst, "null"...)
	}
	return appendInts(dst, raw)
}

// appendPromptLogprobs writes vLLM's shape: a list with null for the first position, then
// {"id":{"logprob","rank","decoded_token"}}. The best alternative has rank 1, a token outside
// them null.
func (e *Encoder) appendPromptLogprobs(dst []byte, lps []TokenLogprob) []byte {
	entry := func(dst []byte, t *TopLogprob, rank int) []byte {
		dst = append(dst, '"')
		dst = strconv.AppendInt(dst, int64(t.ID), 10)
		dst = append(dst, `":{"logprob":`...)
		dst = appendLogprob(dst, t.Logprob)
		if rank == 0 {
			dst = append(dst, `,"rank":null`...)
		} else {
			dst = appendInt(dst, `,"rank":`, rank)
		}
		dst = appendStr(dst, `,"decoded_token":`, e.vocab.TokenText(t.ID))
		return append(dst, '}')
	}
	dst = append(dst, '[')
	for i := range lps {
		lp := &lps[i]
		dst = comma(dst, i)
		if lp.None {
			dst = append(dst, "null"...)
			continue
		}
		rank := 1 + slices.IndexFunc(lp.Top, func(t TopLogprob) bool { return t.ID == lp.ID })
		dst = entry(append(dst, '{'), &lp.TopLogprob, rank)
		for j := range lp.Top {
			if lp.Top[j].ID != lp.ID {
				dst = entry(append(dst, ','), &lp.Top[j], j+1)
			}
		}
		dst = e.put(append(dst, '}'))
	}
	return append(dst, ']')
}
