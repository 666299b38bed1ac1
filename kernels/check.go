package kernels

import (
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/internal/model/arch"
)

// Check returns why a sequence does not fit a backend of shape a with a pool of blocks
// blocks. After it returns nil, everything the sequence names is in bounds.
func (q *Seq) Check(a *arch.Config, blockTokens, blocks int) error {
	n := len(q.Tokens)
	if n == 0 || q.Pos < 0 || q.Pos > a.MaxPositions-n {
		return fmt.Errorf("%d tokens at position %d, context is %d", n, q.Pos, a.MaxPositions)
	}
	for _, id := range q.Tokens {
		if uint(id) >= uint(a.Vocab) {
			return fmt.Errorf("token %d of a vocabulary of %d", id, a.Vocab)
		}
	}
	need := (q.Pos + n + blockTokens - 1) / blockTokens
	if len(q.Blocks) < need {
		return fmt.Errorf("%d blocks for %d positions, want %d", len(q.Blocks), q.Pos+n, need)
	}
	for _, id := range q.Blocks[:need] {
		if uint(id) >= uint(blocks) {
			return fmt.Errorf("block %d of a pool of %d", id, blocks)
		}
	}
	if len(q.Targets) != 0 && len(q.Targets) != n {
		return fmt.Errorf("%d targets for %d tokens", len(q.Targets), n)
	}
	for _, id := range q.Targets {
		if int(id) >= a.Vocab {
			return fmt.Errorf("target %d of a vocabulary of %d", id, a.Vocab)
		}
	}
	if q.Hidden != HiddenNone && (len(q.Samples) > 0 || len(q.Targets) > 0 || q.WantLogits) {
		return errors.New("hidden states and logits exclude each other")
	}
	if q.Verify && (len(q.Samples) != n || q.After != 0 || len(q.Targets) > 0 || q.WantLogits || q.Hidden != HiddenNone) {
		return fmt.Errorf("drafts: %d draws for %d tokens, and nothing else may be asked for", len(q.Samples), n)
	}
	for i := range q.Samples {
		if m := q.Samples[i].Mask; m != nil && len(m) != MaskWords(a.Vocab) {
			return fmt.Errorf("draw %d: a mask of %d words for a vocabulary of %d", i, len(m), a.Vocab)
		}
	}
	return nil
}
