package bind

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/internal/answer"
	"github.com/xpyd/xpyd/internal/grammar"
	"github.com/xpyd/xpyd/kernels"
)

// Tokenizer is what the package needs of a model's.
type Tokenizer interface {
	VocabSize() int
	TokenBytes(id int32) []byte
	IsSpecial(id int32) bool
	Encode(text string, addSpecial bool) []int32
}

// Config is of one model.
type Config struct {
	Tokenizer Tokenizer
	Vocab     int     // the model's, which may have more than the tokenizer's
	Ends      []int32 // tokens that end an answer
	Think     *answer.Think
	Bytes     int64 // of compiled grammars that are kept, about
	// Found, if set, is told how long each grammar took to be there, compiled or kept, and why it is not.
	Found func(took time.Duration, err error)
}

// Binder makes guides for one model. It is safe for concurrent use.
type Binder struct {
	cfg   Config
	think *think

	once    sync.Once // the vocabulary takes a while, and most models are never bound
	cache   *grammar.Cache
	texts   [][]byte         // of the tokenizer's tokens
	special map[string]int32 // tokens by their text
	turns   chan struct{}    // a place for each request that may compile at once: steps need the other processors
}

// New makes a model's binder.
func New(cfg Config) *Binder {
	b := &Binder{cfg: cfg, special: map[string]int32{}, turns: make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2))}
	if cfg.Think != nil {
		open, end := cfg.Think.Around()
		b.think = &think{open: newMarks(open), end: newMarks(end)}
	}
	return b
}

// Calls is the Text of a spec of KindCalls, where the model must call one of some tools, or several, and of KindMayCall,
// where it may: the answer is free until a call begins, and behind it.
type Calls struct {
	Format  string `json:"format"` // of answer.ToolFormat
	Tools   []Tool `json:"tools"`
	Several bool   `json:"several,omitempty"` // more may follow the first
	First   int    `json:"first,omitempty"`   // the number of the answer's first call, where they have one
}

// Tool is what may be called.
type Tool struct {
	Name       string          `json:"name"`
	Parameters json.RawMessage `json:"parameters"`     // a JSON schema
	Free       bool            `json:"free,omitempty"` // any arguments may come, whatever that says
}

// KindCalls and KindMayCall are the kinds of specs that are no grammar alone.
const (
	KindCalls   = "calls"
	KindMayCall = "may_call"
)

var kinds = map[string]grammar.Kind{
	"json_schema": grammar.JSONSchema, "json_object": grammar.JSONObject, "regex": grammar.Regex,
	"choice": grammar.Choice, "ebnf": grammar.EBNF, "lark": grammar.Lark,
}

// Error is a spec that cannot be followed, for who wrote it to mend.
type Error struct {
	Tool   string // whose parameters are meant; "": the grammar
	Where  string // in it; may be empty
	Reason string
}

func (e *Error) Error() string {
	s := e.Reason
	if e.Where != "" {
		s = "at " + e.Where + ": " + s
	}
	if e.Tool != "" {
		s = "the parameters of " + e.Tool + ": " + s
	}
	return s
}

// maxTools bounds the tools of a bound call.
const maxTools = 128

// Guide makes what a spec binds an answer to, at its begin. The schemas of calls are compiled when they
// are come to.
func (b *Binder) Guide(ctx context.Context, spec *handoff.Guide) (engine.Guide, error) {
	done, err := b.turn(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	return b.guide(ctx, spec)
}

// turn waits until a few requests at most compile beside this one.
func (b *Binder) turn(ctx context.Context) (done func(), err error) {
	select {
	case b.turns <- struct{}{}:
		return func() { <-b.turns }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (b *Binder) guide(ctx context.Context, spec *handoff.Guide) (engine.Guide, error) {
	s, err := b.script(ctx, spec)
	if err != nil {
		return nil, err
	}
	g := &guide{place: s.start(), free: s.free != nil}
	if t := b.think; t != nil && spec.Thinks != handoff.ThinksNot {
		g.think, g.in = t, spec.Thinks == handoff.ThinksNow
	}
	return g, nil
}

// Bind is Guide for a request that comes: it compiles all there is first. The error is an *Error, or
// ctx's.
func (b *Binder) Bind(ctx context.Context, spec *handoff.Guide) (engine.Guide, error) {
	done, err := b.turn(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	b.once.Do(b.prepare)
	if spec.Kind == KindCalls || spec.Kind == KindMayCall {
		calls, how, err := b.calls(spec.Text)
		if err != nil {
			return nil, err
		}
		for _, t := range calls.Tools {
			if _, err := b.grammar(ctx, b.argsSpec(how, t)); err != nil {
				var bad *Error
				if errors.As(err, &bad) {
					bad.Tool = t.Name
				}
				return nil, err
			}
		}
	}
	g, err := b.guide(ctx, spec)
	if err != nil {
		return nil, err
	}
	mask := make([]uint32, kernels.MaskWords(b.cfg.Vocab))
	if g.Mask(mask); !slices.ContainsFunc(mask, func(w uint32) bool { return w != 0 }) {
		return nil, &Error{Reason: "no token of this model can begin it"}
	}
	return g, nil
}

func (b *Binder) script(ctx context.Context, spec *handoff.Guide) (*script, error) {
	if len(b.cfg.Ends) == 0 {
		return nil, &Error{Reason: "this model has no token that ends an answer"}
	}
	if spec.Kind == KindCalls || spec.Kind == KindMayCall {
		return b.callScript(spec)
	}
	kind, ok := kinds[spec.Kind]
	if !ok {
		return nil, &Error{Reason: fmt.Sprintf("grammars of kind %.40q are not known here", spec.Kind)}
	}
	s := grammar.Spec{Kind: kind, Text: spec.Text}
	if spec.Compact {
		s.Space = grammar.Compact
	}
	g, err := b.grammar(ctx, s)
	if err != nil {
		return nil, err
	}
	return &script{ends: b.cfg.Ends, first: []option{{tokens: b.encode(spec.Begin), begin: func() (matcher, error) { return matching{g.Matcher()}, nil }}}}, nil
}

// matching is internal/grammar's matcher.
type matching struct{ *grammar.Matcher }

func (m matching) clone() matcher { return matching{m.Clone()} }

func (b *Binder) encode(text string) []int32 {
	if text == "" {
		return nil
	}
	return b.cfg.Tokenizer.Encode(text, false)
}

// grammar compiles a grammar, or finds it.
func (b *Binder) grammar(ctx context.Context, s grammar.Spec) (*grammar.Grammar, error) {
	b.once.Do(b.prepare)
	begin := time.Now()
	g, err := b.cache.Get(ctx, s)
	if b.cfg.Found != nil {
		b.cfg.Found(time.Since(begin), err)
	}
	var bad *grammar.Error
	switch {
	case errors.As(err, &bad):
		err = &Error{Where: bad.Where, Reason: bad.Reason}
	case err != nil && ctx.Err() != nil:
		err = context.Cause(ctx)
	}
	return g, err
}

// prepare tells the grammars what the model's tokens are. Those that are special are no text: a grammar
// does not see them.
func (b *Binder) prepare() {
	tok := b.cfg.Tokenizer
	texts := make([][]byte, b.cfg.Vocab)
	all := make([][]byte, min(b.cfg.Vocab, tok.VocabSize()))
	for id := range all {
		all[id] = tok.TokenBytes(int32(id))
		switch {
		case len(all[id]) == 0:
		case tok.IsSpecial(int32(id)):
			b.special[string(all[id])] = int32(id)
		default:
			texts[id] = all[id]
		}
	}
	b.texts = all
	b.cache = grammar.NewCache(grammar.NewVocabulary(texts, b.cfg.Ends), grammar.Limits{Bytes: handoff.MaxGrammar}, b.cfg.Bytes)
	if b.think != nil {
		b.think.tokens = all
	}
}
