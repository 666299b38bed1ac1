//go:build cgo && linux

package cuda

// #include "api.h"
import "C"

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"unsafe"

	"github.com/xpyd/xpyd/kernels"
)

// queryTile is the rows of one xk_tile, adjustBytes the size of an xk_adjust.
const (
	queryTile   = 128
	adjustBytes = C.sizeof_xk_adjust
)

// stepState is a step from its description to its results, in one half of the memory that
// the device sees. It is reused; a steady state allocates nothing.
type stepState struct {
	half     int
	step     *kernels.Step // set while it is under way
	arena    []byte        // pinned: sections lie in it, see xk_step_args
	used     int
	tokens   []int32 // pinned: drawn ids
	logprobs []C.xk_logprob
	logits   []float32 // pinned; both halves' own
	states   []uint16  // pinned: hidden states, bf16 or fp16

	tail    []int32
	finals  []int32
	wants   []int32
	shown   []int32 // finals whose hidden states are wanted
	samples []C.xk_sample
	adjust  []C.xk_adjust
	items   []C.xk_item
	outs    int // entries of logprobs taken
	fold    *folder
	masks   masks

	results []kernels.Result
	drawn   []kernels.Sampled
	prompts []kernels.PromptLogprob
	tops    []kernels.TokenLogprob
	hidden  []float32
	rows    [][]float32 // of hidden
}

func (s *stepState) init(half int, b *Backend, buf *C.xk_buffers, fold *folder) {
	s.half, s.fold = half, fold
	s.arena = halfOf((*byte)(buf.arena), int(buf.arena_bytes), half)
	s.tokens = halfOf((*int32)(unsafe.Pointer(buf.tokens)), int(buf.max_samples), half)
	s.logprobs = halfOf(buf.logprobs, int(buf.max_logprobs), half)
	if buf.logits != nil { // not of a rank that draws nothing
		s.logits = unsafe.Slice((*float32)(unsafe.Pointer(buf.logits)), int(buf.max_wants)*b.arch.Vocab)
	}
	if buf.states != nil {
		s.states = halfOf((*uint16)(unsafe.Pointer(buf.states)), int(buf.max_states)*b.arch.Hidden, half)
	}
	if buf.masks != nil {
		s.masks.pinned = halfOf((*uint32)(unsafe.Pointer(buf.masks)), int(buf.max_masks*buf.mask_words), half)
	}
}

func halfOf[T any](p *T, n, half int) []T { return unsafe.Slice(p, 2*n)[half*n : (half+1)*n] }

// section takes n values from the arena and returns them with their offset; nil when the
// arena is full.
func section[T any](s *stepState, n int) ([]T, C.int64_t) {
	var zero T
	at := (s.used + 15) &^ 15
	end := at + n*int(unsafe.Sizeof(zero))
	if end > len(s.arena) {
		s.used = len(s.arena) + 1
		return nil, 0
	}
	s.used = end
	if n == 0 {
		return nil, C.int64_t(at)
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&s.arena[at])), n), C.int64_t(at)
}

func put[T any](s *stepState, values []T, n int) C.int64_t {
	to, at := section[T](s, n)
	copy(to, values)
	return at
}

// Step implements kernels.Backend.
func (b *Backend) Step(st *kernels.Step) ([]kernels.Result, error) {
	if b.launched > b.awaited {
		return nil, &kernels.Error{Call: "step", Err: errUnderWay}
	}
	if len(st.Seqs) == 0 {
		return nil, nil
	}
	if err := b.Launch(st); err != nil {
		return nil, err
	}
	return b.Await()
}

// Launch implements kernels.Launcher.
func (b *Backend) Launch(st *kernels.Step) error {
	bucket, err := b.check(st)
	if err == nil {
		err = b.launch(st, bucket)
	}
	if err != nil {
		return &kernels.Error{Call: "step", Err: err}
	}
	return nil
}

// check refuses what could reach outside the device's memory, and picks the graph's bucket;
// 0 is no graph.
func (b *Backend) check(st *kernels.Step) (bucket int, err error) {
	switch {
	case b.closed:
		return 0, errClosed
	case b.launched-b.awaited == uint64(len(b.steps)), b.held != nil:
		return 0, errUnderWay
	case len(st.Seqs) == 0:
		return 0, errors.New("no sequences")
	}
	rows, finals, masked := 0, 0, false
	single := st.OnLayer == nil && len(st.Arrivals) == 0
	for i := range st.Seqs {
		q := &st.Seqs[i]
		if err := q.Check(&b.arch, b.layout.BlockTokens, b.blocks); err != nil {
			return 0, fmt.Errorf("sequence %d: %w", i, err)
		}
		if q.After < 0 || q.After > b.draws || q.After > 0 && len(q.Tokens) != 1 {
			return 0, fmt.Errorf("sequence %d: %d tokens after draw %d of %d", i, len(q.Tokens), q.After, b.draws)
		}
		if q.WantLogits && b.launched > b.awaited {
			return 0, fmt.Errorf("sequence %d wants logits while a step is under way", i)
		}
		if st.Hold && len(q.Targets) > 0 {
			return 0, fmt.Errorf("sequence %d has targets in a step that is held", i)
		}
		switch {
		case q.Verify:
			finals += len(q.Samples)
		case len(q.Samples) > 0 || q.WantLogits:
			finals++
		}
		finals += q.Hidden.Rows(len(q.Tokens))
		masked = masked || slices.ContainsFunc(q.Samples, func(p kernels.Sample) bool { return p.Mask != nil })
		rows += len(q.Tokens)
		single = single && len(q.Tokens) == 1 && len(q.Samples) <= 1 && len(q.Targets) == 0 && q.Hidden == kernels.HiddenNone
	}
	if rows > b.opt.MaxTokens {
		return 0, fmt.Errorf("%w: %d tokens of at most %d", kernels.ErrStepTooLarge, rows, b.opt.MaxTokens)
	}
	if st.Hold && finals > b.opt.MaxSeqs {
		return 0, fmt.Errorf("%w: %d rows of logits of at most %d in a step that is held", kernels.ErrStepTooLarge, finals, b.opt.MaxSeqs)
	}
	if single && !b.opt.NoGraphs && (st.Hold || !masked) { // a graph that draws knows no masks
		bucket = bucketFor(rows, min(b.opt.MaxSeqs, b.opt.MaxTokens))
	}
	return bucket, nil
}

// launch describes the step and launches it. A bucket pads every section to
// that many entries, so that they lie where its graph has them.
func (b *Backend) launch(st *kernels.Step, bucket int) error {
	s := &b.steps[b.launched%uint64(len(b.steps))]
	args, err := b.describe(s, st, bucket)
	if err != nil {
		return err
	}
	free, err := b.behind(st.Arrivals)
	if err != nil {
		return err
	}
	err = b.lib.call("xk_step", func() C.int32_t { return C.api_step(b.lib.api, b.ctx, &args) })
	free()
	if err != nil {
		return err
	}
	b.noteLaunch(s, st)
	return nil
}

func (b *Backend) noteLaunch(s *stepState, st *kernels.Step) {
	s.step, s.masks.err = st, nil
	if st.Hold {
		b.held = s
	}
	b.launched++
	b.draws = 0
	for i := range st.Seqs {
		b.draws += len(st.Seqs[i].Samples)
	}
}

// Await implements kernels.Launcher.
func (b *Backend) Await() ([]kernels.Result, error) {
	if b.launched == b.awaited {
		return nil, &kernels.Error{Call: "step", Err: errors.New("no step is under way")}
	}
	s := &b.steps[b.awaited%uint64(len(b.steps))]
	if s == b.held {
		return nil, &kernels.Error{Call: "step", Err: errHeld}
	}
	b.awaited++
	st := s.step
	s.step = nil
	if st.OnLayer != nil {
		if err := b.layers(st); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(b.waitStep(), s.masks.err); err != nil {
		return nil, err
	}
	return b.collect(s, st), nil
}

// layers calls OnLayer for each layer as it is done. However it ends, the library does not
// count the step as waited for.
func (b *Backend) layers(st *kernels.Step) (err error) {
	done := false
	defer func() {
		if !done { // an error, or a panic in OnLayer
			err = errors.Join(err, b.waitStep())
		}
	}()
	for l := range b.arch.Layers {
		err := b.lib.call("xk_wait_layer", func() C.int32_t { return C.api_wait_layer(b.lib.api, b.ctx, C.int32_t(l)) })
		if err != nil {
			return err
		}
		st.OnLayer(l)
	}
	done = true
	return nil
}

func (b *Backend) waitStep() error {
	return b.lib.call("xk_wait_step", func() C.int32_t { return C.api_wait_step(b.lib.api, b.ctx) })
}

// describe fills the arena of s, whose previous step is over. It changes nothing else: a
// step that is too large leaves no trace.
func (b *Backend) describe(s *stepState, st *kernels.Step, bucket int) (C.xk_step_args, error) {
	s.used = 0
	rows, segs, decodes, tiles := 0, 0, 0, 0
	s.outs = 0
	bt := b.layout.BlockTokens
	for i := range st.Seqs {
		q := &st.Seqs[i]
		n := len(q.Tokens)
		rows += n
		segs += (q.Pos+n-1)/bt - q.Pos/bt + 1
		if n == 1 {
			decodes++
		} else {
			tiles += (n + queryTile - 1) / queryTile
		}
	}
	if bucket > 0 {
		rows, segs, decodes = bucket, bucket, bucket
	}
	var a C.xk_step_args
	var tokens, positions, tables, decode []int32
	var seg []C.xk_seg
	var tile []C.xk_tile
	tokens, a.tokens = section[int32](s, rows)
	positions, a.positions = section[int32](s, rows)
	tables, a.tables = section[int32](s, rows)
	seg, a.segs = section[C.xk_seg](s, segs)
	decode, a.decode = section[int32](s, decodes)
	_, a.spans = section[C.xk_span](s, decodes+b.moreSpans)
	tile, a.tiles = section[C.xk_tile](s, tiles)

	s.tail, s.finals, s.wants = s.tail[:0], s.finals[:0], s.wants[:0]
	s.shown = s.shown[:0]
	s.samples, s.adjust, s.items = s.samples[:0], s.adjust[:0], s.items[:0]
	s.masks.reset()
	row, nseg, ndecode, ntile := 0, 0, 0, 0
	for i := range st.Seqs {
		q := &st.Seqs[i]
		n := len(q.Tokens)
		table := int32(len(s.tail))
		s.tail = append(s.tail, q.Blocks[:(q.Pos+n+bt-1)/bt]...)
		if copy(tokens[row:], q.Tokens); q.After > 0 {
			tokens[row] = -int32(q.After)
		}
		for j := range n {
			positions[row+j] = int32(q.Pos + j)
			tables[row+j] = table
		}
		for j := 0; j < n; {
			pos := q.Pos + j
			run := min(bt-pos%bt, n-j)
			seg[nseg] = C.xk_seg{row: C.int32_t(row + j), n: C.int32_t(run), block: C.int32_t(q.Blocks[pos/bt]), at: C.int32_t(pos % bt), pos: C.int32_t(pos - pos%bt)}
			nseg++
			j += run
		}
		if n == 1 {
			decode[ndecode] = int32(row)
			ndecode++
		} else {
			for j := 0; j < n; j += queryTile {
				tile[ntile] = C.xk_tile{row: C.int32_t(row + j), n: C.int32_t(min(queryTile, n-j)), pos: C.int32_t(q.Pos + j), table: C.int32_t(table)}
				ntile++
			}
		}
		if err := b.answers(s, q, row); err != nil {
			return a, fmt.Errorf("sequence %d: %w", i, err)
		}
		row += n
	}
	slices.SortStableFunc(tile, func(x, y C.xk_tile) int { return int(y.pos + y.n - x.pos - x.n) })
	finals, samples, items := len(s.finals), len(s.samples), len(s.items)
	if bucket > 0 {
		for i := row; i < bucket; i++ {
			tokens[i], positions[i], tables[i] = 0, -1, 0
			decode[i] = int32(i)
			seg[i] = C.xk_seg{}
		}
		for len(s.samples) < bucket {
			s.samples = append(s.samples, C.xk_sample{final: -1})
		}
		for len(s.items) < bucket {
			s.items = append(s.items, C.xk_item{final: -1})
		}
		for len(s.finals) < bucket {
			s.finals = append(s.finals, 0)
		}
		finals, samples, items = bucket, bucket, bucket
	}
	base := C.int32_t(len(s.tail)*4+15) / adjustBytes
	for i := range s.samples {
		s.samples[i].adjust += base
		s.samples[i].out = C.int32_t(s.half*len(s.tokens) + i)
	}
	a.finals = put(s, s.finals, finals)
	if bucket == 0 {
		_, a.final_spans = section[C.xk_span](s, finals+b.moreSpans)
	}
	a.samples = put(s, s.samples, samples)
	a.items = put(s, s.items, items)
	a.tail = put(s, s.tail, len(s.tail))
	a.adjust = a.tail // samples count from there: a graph has one place for both
	put(s, s.adjust, len(s.adjust))
	if n := len(s.masks.list); n > 0 {
		a.masks, a.n_masks = put(s, s.masks.ofSamples(samples), samples), C.int32_t(n)
		if !st.Hold {
			s.masks.fill()
		}
	}
	a.used_bytes = C.int64_t(s.used)
	a.wants = put(s, s.wants, len(s.wants))
	a.states = put(s, s.shown, len(s.shown))
	if s.used > len(s.arena) {
		return a, fmt.Errorf("%w: block tables and penalties of more than %d bytes", kernels.ErrStepTooLarge, len(s.arena))
	}
	a.n_rows, a.n_segs, a.n_decode, a.n_tiles = C.int32_t(rows), C.int32_t(segs), C.int32_t(decodes), C.int32_t(tiles)
	a.n_finals, a.n_samples, a.n_items, a.n_wants = C.int32_t(finals), C.int32_t(samples), C.int32_t(items), C.int32_t(len(s.wants))
	a.n_states = C.int32_t(len(s.shown))
	a.bucket, a.on_layer, a.half, a.hold = C.int32_t(bucket), flag(st.OnLayer != nil), C.int32_t(s.half), flag(st.Hold)
	return a, nil
}

// answers records what is wanted from one sequence's logits. collect walks in the same
// order.
func (b *Backend) answers(s *stepState, q *kernels.Seq, row int) error {
	n := len(q.Tokens)
	for i := n - q.Hidden.Rows(n); i < n; i++ {
		s.shown = append(s.shown, int32(len(s.finals)))
		s.finals = append(s.finals, int32(row+i))
	}
	for i := range n {
		first, end := 0, 0 // of the draws behind this token
		switch {
		case q.Verify:
			first, end = i, i+1
		case i == n-1:
			end = len(q.Samples)
		}
		target := len(q.Targets) > 0 && q.Targets[i] >= 0
		wants := i == n-1 && q.WantLogits
		if end == 0 && !wants && !target {
			continue
		}
		final := C.int32_t(len(s.finals))
		s.finals = append(s.finals, int32(row+i))
		if target {
			s.item(final, C.int32_t(q.Targets[i]), b.tops(q.TargetLogprobs))
		}
		for j := first; j < end; j++ {
			p := &q.Samples[j]
			if p.Logprobs >= 0 {
				s.item(final, C.int32_t(-1-len(s.samples)), b.tops(p.Logprobs))
			}
			var before *kernels.Sample
			if j > 0 {
				before = &q.Samples[j-1]
			}
			s.sample(final, p, before)
			if !s.masks.add(p, before) {
				return fmt.Errorf("%w: more masks than %d words hold", kernels.ErrStepTooLarge, len(s.masks.pinned))
			}
		}
		if wants {
			s.wants = append(s.wants, int32(final))
		}
	}
	if len(s.samples) > len(s.tokens) || s.outs > len(s.logprobs) || len(s.wants) > len(s.logits)/b.arch.Vocab {
		return fmt.Errorf("%w: %d draws, %d log probabilities and %d rows of logits, of at most %d, %d and %d", kernels.ErrStepTooLarge,
			len(s.samples), s.outs, len(s.wants), len(s.tokens), len(s.logprobs), len(s.logits)/b.arch.Vocab)
	}
	return nil
}

// tops returns the length of a list of most likely tokens.
func (b *Backend) tops(n int) int { return min(max(n, 0), b.arch.Vocab) }

func (s *stepState) item(final, id C.int32_t, top int) {
	s.items = append(s.items, C.xk_item{final: final, id: id, top: C.int32_t(top), out: C.int32_t(s.half*len(s.logprobs) + s.outs)})
	s.outs += 1 + top
}

// sample records a draw. All choices of one prompt share its history, so a draw like the
// one before it in the same sequence (nil: none) shares its list: many choices of a long
// prompt take no more of the arena than one.
func (s *stepState) sample(final C.int32_t, p, before *kernels.Sample) {
	from, n := C.int32_t(len(s.adjust)), C.int32_t(0)
	if before != nil && folds(before, p) {
		last := &s.samples[len(s.samples)-1]
		from, n = last.adjust, last.n_adjust
	} else {
		s.adjust = s.fold.fold(s.adjust, p)
		n = C.int32_t(len(s.adjust)) - from
	}
	s.samples = append(s.samples, C.xk_sample{
		final: final, top_k: C.int32_t(min(max(p.TopK, 0), 1<<30)),
		temperature: C.float(p.Temperature), top_p: C.float(p.TopP), min_p: C.float(p.MinP),
		repetition: C.float(p.Repetition), presence: C.float(p.Presence), frequency: C.float(p.Frequency),
		adjust: from, n_adjust: n,
		seed_lo: C.uint32_t(p.Seed), seed_hi: C.uint32_t(p.Seed >> 32),
		pos_lo: C.uint32_t(p.Position), pos_hi: C.uint32_t(uint64(p.Position) >> 32), choice: C.uint32_t(p.Choice),
	})
}

// collect reads the results, which stay valid until s is described anew.
func (b *Backend) collect(s *stepState, st *kernels.Step) []kernels.Result {
	s.results = resize(s.results, len(st.Seqs))
	s.tops = resize(s.tops, s.outs)
	for i := range s.outs {
		e := &s.logprobs[i]
		s.tops[i] = kernels.TokenLogprob{ID: int32(e.id), Logprob: float32(e.logprob), Rank: int32(e.rank)}
	}
	var samples, prompts int
	for i := range st.Seqs {
		samples += len(st.Seqs[i].Samples)
		prompts += len(st.Seqs[i].Targets)
	}
	s.drawn, s.prompts = resize(s.drawn, samples), resize(s.prompts, prompts)
	clear(s.prompts)
	out := 0
	take := func(top int) (self kernels.TokenLogprob, list []kernels.TokenLogprob) {
		self = s.tops[out]
		if top > 0 {
			list = s.tops[out+1 : out+1+top : out+1+top]
		}
		out += 1 + top
		return self, list
	}
	s.widen(b.arch.Hidden, b.opt.FP16)
	sample, prompt, want, shown := 0, 0, 0, 0
	for i := range st.Seqs {
		q, r := &st.Seqs[i], &s.results[i]
		*r = kernels.Result{}
		if n := len(q.Targets); n > 0 {
			r.Prompt = s.prompts[prompt : prompt+n : prompt+n]
			prompt += n
			for j, id := range q.Targets {
				if id >= 0 {
					r.Prompt[j].Self, r.Prompt[j].Top = take(b.tops(q.TargetLogprobs))
				}
			}
		}
		if n := len(q.Samples); n > 0 {
			r.Samples = s.drawn[sample : sample+n : sample+n]
			for j := range q.Samples {
				r.Samples[j] = kernels.Sampled{Token: s.tokens[sample+j]}
				if p := &q.Samples[j]; p.Logprobs >= 0 {
					self, top := take(b.tops(p.Logprobs))
					if r.Samples[j].Token != kernels.NoToken {
						r.Samples[j].Self, r.Samples[j].Top = self, top
					}
				}
			}
			sample += n
		}
		if n := q.Hidden.Rows(len(q.Tokens)); n > 0 {
			r.Hidden = s.rows[shown : shown+n : shown+n]
			shown += n
		}
		if q.WantLogits {
			r.Logits = s.logits[want*b.arch.Vocab : (want+1)*b.arch.Vocab : (want+1)*b.arch.Vocab]
			want++
		}
	}
	return s.results
}

// widen reads the hidden states of the step, rows of a width.
func (s *stepState) widen(width int, fp16 bool) {
	n := len(s.shown)
	s.hidden, s.rows = resize(s.hidden, n*width), resize(s.rows, n)
	for i, v := range s.states[:n*width] {
		if fp16 {
			s.hidden[i] = kernels.FromF16(v)
		} else {
			s.hidden[i] = math.Float32frombits(uint32(v) << 16)
		}
	}
	for i := range s.rows {
		s.rows[i] = s.hidden[i*width : (i+1)*width : (i+1)*width]
	}
}

func resize[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n, n+n/2)
	}
	return s[:n]
}

// folder merges a draw's bias, bans and penalties into one entry for each token, so that
// the device can apply them in any order.
type folder struct {
	at []int32 // by token: 1 + its entry, 0 between draws
}

func newFolder(vocab int) *folder { return &folder{make([]int32, vocab)} }

// folds reports whether fold gives the same result for two draws: their lists are the same
// memory and the same penalties are on.
func folds(p, q *kernels.Sample) bool {
	return same(p.Bias, q.Bias) && same(p.Ban, q.Ban) && same(p.Prompt, q.Prompt) && same(p.Output, q.Output) &&
		repeats(p) == repeats(q) && counts(p) == counts(q)
}

func same[T any](a, b []T) bool { return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0]) }

func repeats(p *kernels.Sample) bool { return p.Repetition != 1 && p.Repetition != 0 }

func counts(p *kernels.Sample) bool { return p.Presence != 0 || p.Frequency != 0 }

func (f *folder) fold(list []C.xk_adjust, p *kernels.Sample) []C.xk_adjust {
	from := len(list)
	entry := func(id int32) *C.xk_adjust {
		if uint(id) >= uint(len(f.at)) {
			return nil
		}
		if f.at[id] == 0 {
			list = append(list, C.xk_adjust{id: C.int32_t(id)})
			f.at[id] = int32(len(list) - from)
		}
		return &list[from+int(f.at[id])-1]
	}
	for _, v := range p.Bias {
		if e := entry(v.ID); e != nil {
			e.bias += C.float(v.Value)
		}
	}
	for _, id := range p.Ban {
		if e := entry(id); e != nil {
			e.flags |= C.XK_BAN
		}
	}
	if repeats(p) {
		for _, ids := range [2][]int32{p.Prompt, p.Output} {
			for _, id := range ids {
				if e := entry(id); e != nil {
					e.flags |= C.XK_SEEN
				}
			}
		}
	}
	if counts(p) {
		for _, id := range p.Output {
			if e := entry(id); e != nil {
				e.count++
			}
		}
	}
	for i := range list[from:] {
		f.at[list[from+i].id] = 0
	}
	return list
}
