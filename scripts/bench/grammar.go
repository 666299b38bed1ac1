package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/grammar"
	"github.com/xpyd/xpyd/internal/tokenizer"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// grammarBench measures internal/grammar beside llguidance on the schemas of JSONSchemaBench:
// which of them compile and how long that takes, whether both allow the same tokens in the
// texts that come with them, and how long a mask takes.
type grammarBench struct {
	base
	schemas, tokenizer, venv string
	every, prefixes          int

	tok  *tokenizer.Tokenizer
	v    *grammar.Vocabulary
	end  int32
	peer *llguidance
}

// flexibleSpace is grammar.Flexible as a regular expression.
const flexibleSpace = `[ \t\n\r]{1,20}`

func (b *grammarBench) flags(f *flag.FlagSet) {
	f.StringVar(&b.schemas, "schemas", "", "folder of the repository guidance-ai/jsonschemabench")
	f.StringVar(&b.tokenizer, "tokenizer", "", "folder of a tokenizer.json of about 128k tokens")
	f.StringVar(&b.venv, "venv", "", "virtual environment with llguidance; made in the user's cache if empty")
	f.IntVar(&b.every, "every", 1, "take each N-th schema")
	f.IntVar(&b.prefixes, "prefixes", 2000, "beginnings of texts whose masks are compared")
}

func (b *grammarBench) parts() []part {
	return []part{{"compile", b.compile}, {"masks", b.masks}, {"speed", b.speed}}
}

func (b *grammarBench) open(ctx context.Context) error {
	if b.schemas == "" || b.tokenizer == "" {
		return errors.New("-schemas and -tokenizer are needed")
	}
	var err error
	if b.tok, err = tokenizer.Load(b.tokenizer); err != nil {
		return err
	}
	tokens, eos := make([][]byte, b.tok.VocabSize()), b.tok.EOS()
	for id := range tokens {
		if !b.tok.IsSpecial(int32(id)) {
			tokens[id] = b.tok.TokenBytes(int32(id))
		}
	}
	if len(eos) == 0 {
		return errors.New("the tokenizer has no end token")
	}
	b.end = eos[0]
	tokens[b.end] = nil
	b.v = grammar.NewVocabulary(tokens, eos[:1])
	venv, err := harness.Python{Venv: b.venv, Name: "llguidance", Imports: "llguidance.numpy", Pip: [][]string{{"llguidance==1.9.1", "numpy"}}}.Open(ctx)
	if err != nil {
		return err
	}
	b.peer, err = startLLGuidance(ctx, filepath.Join(venv, "bin", "python"), tokens, b.end)
	return err
}

func (b *grammarBench) close() error {
	if b.peer == nil {
		return nil
	}
	return b.peer.close()
}

// files are the schemas, or with texts the schemas that come with texts, each -every-th.
func (b *grammarBench) files(pattern string) ([]string, error) {
	all, err := filepath.Glob(filepath.Join(b.schemas, pattern))
	if err != nil {
		return nil, err
	}
	var some []string
	for i, f := range all {
		if i%b.every == 0 {
			some = append(some, f)
		}
	}
	if len(some) == 0 {
		return nil, fmt.Errorf("no file matches %s in %s", pattern, b.schemas)
	}
	return some, nil
}

func (b *grammarBench) compile(context.Context) error {
	files, err := b.files("data/*/*.json")
	if err != nil {
		return err
	}
	var ours, theirs []float64 // ms, of all
	var both, onlyOurs, onlyTheirs int
	reasons := map[string]int{}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		begin := threadTime()
		_, refused := grammar.Compile(grammar.Spec{Kind: grammar.JSONSchema, Text: string(text)}, b.v, grammar.Limits{})
		ms := (threadTime() - begin).Seconds() * 1000
		peer, err := b.peer.ask(question{Op: "compile", Schema: string(text), Space: flexibleSpace})
		if err != nil {
			return err
		}
		ours, theirs = append(ours, ms), append(theirs, peer.US/1000)
		switch {
		case refused == nil && peer.Error == "":
			both++
		case refused == nil:
			onlyOurs++
		case peer.Error == "":
			onlyTheirs++
			b.Sayf("only llguidance compiles %s: %v", filepath.Base(f), refused)
		}
		var e *grammar.Error
		if errors.As(refused, &e) {
			reasons[e.Reason]++
		}
		if ms > 100 {
			b.Sayf("%s takes %.0f ms, llguidance %.0f ms", filepath.Base(f), ms, peer.US/1000)
		}
	}
	for reason, n := range reasons {
		if n >= 20 {
			b.Sayf("%5d refused: %s", n, reason)
		}
	}
	b.Sayf("%d schemas: both compile %d, only we %d, only llguidance %d", len(files), both, onlyOurs, onlyTheirs)
	load := fmt.Sprintf("%d schemas of JSONSchemaBench, white space %s, processor time", len(files), flexibleSpace)
	share := float64(both+onlyOurs) / float64(len(files))
	list := []figures.Figure{{
		Name: "grammar.coverage_ratio", Value: share, Unit: "of the schemas compile", Peer: "llguidance 1.9.1",
		PeerValue: float64(both+onlyTheirs) / float64(len(files)), Model: load, Runs: 1,
		Spread: fmt.Sprintf("both %d, only ours %d, only llguidance's %d", both, onlyOurs, onlyTheirs),
	}}
	list[0].Ratio = list[0].Value / list[0].PeerValue
	return b.Add(append(list, quantiles("grammar.compile_ms", "ms", load, ours, theirs)...)...)
}

// threadTime is the processor time of this thread, which main has locked: other programs on
// the machine do not count.
func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err) // the clock is Linux's own
	}
	return time.Duration(t.Nano())
}

// quantiles are the median and the 99th percentile of both.
func quantiles(name, unit, load string, ours, theirs []float64) []figures.Figure {
	var list []figures.Figure
	for _, q := range []struct {
		name string
		at   float64
	}{{"p50", 0.5}, {"p99", 0.99}} {
		list = append(list, figures.Figure{
			Name: name + "." + q.name, Value: quantile(ours, q.at), Unit: unit, Peer: "llguidance 1.9.1", PeerValue: quantile(theirs, q.at),
			Model: load, Runs: 1, Spread: fmt.Sprintf("largest %.3g and %.3g", slices.Max(ours), slices.Max(theirs)),
		})
	}
	for i := range list {
		list[i].Ratio = list[i].Value / list[i].PeerValue
	}
	return list
}

func quantile(list []float64, at float64) float64 {
	list = slices.Sorted(slices.Values(list))
	return list[min(int(at*float64(len(list))), len(list)-1)]
}

// example is a file of JSONSchemaBench's maskbench.
type example struct {
	Schema json.RawMessage `json:"schema"`
	Tests  []struct {
		Valid bool            `json:"valid"`
		Data  json.RawMessage `json:"data"`
	} `json:"tests"`
}

func (b *grammarBench) masks(context.Context) error {
	files, err := b.files("maskbench/data/*.json")
	if err != nil {
		return err
	}
	rnd := rand.New(rand.NewPCG(1, 1))
	rnd.Shuffle(len(files), func(i, j int) { files[i], files[j] = files[j], files[i] })
	c := comparison{grammarBench: b, rnd: rnd, kinds: map[string]int{}}
	for _, f := range files {
		if c.compared >= b.prefixes {
			break
		}
		text, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		var e example
		if err := json.Unmarshal(text, &e); err != nil {
			return fmt.Errorf("%s: %w", f, err)
		}
		if err := c.schema(filepath.Base(f), e); err != nil {
			return err
		}
	}
	for kind, n := range c.kinds {
		b.Sayf("%5d masks differ: %s", n, kind)
	}
	b.Sayf("%d masks, %d equal; valid texts that both refuse %d, only we %d, only llguidance %d",
		c.compared, c.equal, c.refused[2], c.refused[0], c.refused[1])
	return b.Add(figures.Figure{
		Name: "grammar.masks_equal", Value: float64(c.equal) / float64(c.compared), Unit: "of the masks", Peer: "all", PeerValue: 1,
		Ratio: float64(c.equal) / float64(c.compared), Runs: 1, Spread: "the others: internal/grammar/DESIGN.md, Beside llguidance",
		Model: fmt.Sprintf("%d places in texts of JSONSchemaBench and random ones, %d tokens, white space %s, beside llguidance 1.9.1 with no_forcing", c.compared, b.v.Size(), flexibleSpace),
	})
}

// speed times the masks along whole texts, of grammars that are not used before.
func (b *grammarBench) speed(context.Context) error {
	files, err := b.files("maskbench/data/*.json")
	if err != nil {
		return err
	}
	var ours, theirs []float64 // us
	bits := make([]uint32, (b.v.Size()+31)/32)
	for i, f := range files {
		if i%max(speedEvery/b.every, 1) != 0 {
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		var e example
		if err := json.Unmarshal(text, &e); err != nil {
			return fmt.Errorf("%s: %w", f, err)
		}
		g, err := grammar.Compile(grammar.Spec{Kind: grammar.JSONSchema, Text: string(e.Schema)}, b.v, grammar.Limits{})
		if err != nil {
			continue
		}
		peer, err := b.peer.ask(question{Op: "compile", Schema: string(e.Schema), Space: flexibleSpace})
		if err != nil {
			return err
		}
		if peer.Error != "" {
			continue
		}
		for _, t := range e.Tests {
			if !t.Valid {
				continue
			}
			ids := b.tok.Encode(string(t.Data), false)
			ids = ids[:min(len(ids), 400)]
			m := g.Matcher()
			n := 0
			for ; n < len(ids); n++ {
				begin := threadTime()
				m.Mask(bits)
				ours = append(ours, float64(threadTime()-begin)/1e3)
				if !m.Accept(ids[n]) {
					break
				}
			}
			if _, err := b.peer.ask(question{Op: "start"}); err != nil {
				return err
			}
			for _, id := range ids[:n] {
				said, err := b.peer.ask(question{Op: "mask"})
				if err != nil {
					return err
				}
				theirs = append(theirs, said.US)
				if said, err = b.peer.ask(question{Op: "accept", Token: id}); err != nil || said.Error != "" {
					if err != nil {
						return err
					}
					break
				}
			}
		}
	}
	load := fmt.Sprintf("%d masks along whole texts of JSONSchemaBench, %d tokens, white space %s, processor time", len(ours), b.v.Size(), flexibleSpace)
	return b.Add(quantiles("grammar.mask_us", "us", load, ours, theirs)...)
}

// speedEvery thins out the files of speed, which has thousands of masks from a few hundred.
const speedEvery = 40

// comparison walks texts with both engines.
type comparison struct {
	*grammarBench
	rnd             *rand.Rand
	compared, equal int
	kinds           map[string]int
	refused         [3]int
}

// perSchema bounds the places of one schema, so that many schemas take part.
const perSchema = 60

func (c *comparison) schema(name string, e example) error {
	g, err := grammar.Compile(grammar.Spec{Kind: grammar.JSONSchema, Text: string(e.Schema)}, c.v, grammar.Limits{})
	if err != nil {
		return nil
	}
	peer, err := c.peer.ask(question{Op: "compile", Schema: string(e.Schema), Space: flexibleSpace, All: true})
	if err != nil || peer.Error != "" {
		return err
	}
	left := perSchema
	for _, t := range e.Tests {
		if !t.Valid || left <= 0 {
			continue
		}
		ids := c.tok.Encode(string(t.Data), false)
		if err := c.text(name, g, append(ids, c.end), &left); err != nil {
			return err
		}
	}
	if left > 0 { // and a text at random
		return c.text(name, g, nil, &left)
	}
	return nil
}

// text compares the masks along a text; without ids along a random one.
func (c *comparison) text(name string, g *grammar.Grammar, ids []int32, left *int) error {
	if _, err := c.peer.ask(question{Op: "start"}); err != nil {
		return err
	}
	m := g.Matcher()
	bits, their := make([]uint32, (c.v.Size()+31)/32), make([]uint32, (c.v.Size()+31)/32)
	var soFar []byte
	for i := 0; *left > 0 && (ids == nil && i < 20 || i < len(ids)); i++ {
		begin := threadTime()
		m.Mask(bits)
		us := (threadTime() - begin).Seconds() * 1e6
		said, err := c.peer.ask(question{Op: "mask", All: true})
		if err != nil {
			return err
		}
		raw, err := base64.StdEncoding.DecodeString(said.Bits)
		if err != nil {
			return err
		}
		for i := range their {
			their[i] = binary.LittleEndian.Uint32(raw[4*i:])
		}
		c.compared++
		*left--
		if kind, same := c.differ(bits, their, soFar); same {
			c.equal++
		} else {
			c.kinds[kind]++
			c.Sayf("%s behind %q: %s", name, tail(soFar), kind)
		}
		if us > 1000 {
			c.Sayf("%s behind %q: %.0f us, llguidance %.0f", name, tail(soFar), us, said.US)
		}
		var token int32
		if ids != nil {
			token = ids[i]
		} else if token = c.common(bits, their); token < 0 {
			return nil
		}
		ok := m.Accept(token)
		said, err = c.peer.ask(question{Op: "accept", Token: token})
		if err != nil {
			return err
		}
		if !ok || said.Error != "" {
			which := 2
			if ok {
				which = 1
			} else if said.Error == "" {
				which = 0
			}
			c.refused[which]++
			if which < 2 {
				c.Sayf("%s behind %q: ours %v, llguidance %q of %q", name, tail(soFar), ok, said.Error, c.tok.TokenBytes(token))
			}
			return nil
		}
		if token == c.end {
			return nil
		}
		soFar = append(soFar, c.tok.TokenBytes(token)...)
	}
	return nil
}

func tail(b []byte) string { return strings.ToValidUTF8(string(b[max(0, len(b)-60):]), "?") }

// differ says how two masks differ.
func (c *comparison) differ(ours, theirs []uint32, _ []byte) (string, bool) {
	var more, less []string
	n, m := 0, 0
	for id := range int32(c.v.Size()) {
		a, b := ours[id>>5]>>(id&31)&1, theirs[id>>5]>>(id&31)&1
		switch {
		case a > b:
			if n++; len(more) < 4 {
				more = append(more, string(c.tok.TokenBytes(id)))
			}
		case b > a:
			if m++; len(less) < 4 {
				less = append(less, string(c.tok.TokenBytes(id)))
			}
		}
	}
	if n+m == 0 {
		return "", true
	}
	return fmt.Sprintf("only ours %d %q, only llguidance's %d %q", n, more, m, less), false
}

// common is a token that both allow, at random, and the end seldom.
func (c *comparison) common(a, b []uint32) int32 {
	var both []int32
	for id := range int32(c.v.Size()) {
		if a[id>>5]&b[id>>5]>>(id&31)&1 != 0 {
			both = append(both, id)
		}
	}
	if len(both) == 0 {
		return -1
	}
	return both[c.rnd.IntN(len(both))]
}

// llguidance is scripts/grammar/llguidance_peer.py.
type llguidance struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

type question struct {
	Op     string `json:"op"`
	Schema string `json:"schema"`
	Space  string `json:"space"`
	All    bool   `json:"all"` // masks with every token that the grammar allows, and their bits
	Token  int32  `json:"token"`
}

type peerSaid struct {
	Error string  `json:"error"`
	US    float64 `json:"us"`
	Bits  string  `json:"bits"`
}

func startLLGuidance(ctx context.Context, python string, tokens [][]byte, end int32) (*llguidance, error) {
	cmd := exec.CommandContext(ctx, python, "scripts/grammar/llguidance_peer.py")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &llguidance{cmd, in, bufio.NewReaderSize(out, 1<<20)}
	if err := json.NewEncoder(in).Encode(map[string]any{"tokens": tokens, "end": end}); err != nil {
		return nil, errors.Join(err, p.close())
	}
	if _, err := p.out.ReadBytes('\n'); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

func (p *llguidance) ask(a question) (peerSaid, error) {
	var said peerSaid
	if err := json.NewEncoder(p.in).Encode(a); err != nil {
		return said, err
	}
	line, err := p.out.ReadBytes('\n')
	if err != nil {
		return said, fmt.Errorf("llguidance: %w", err)
	}
	return said, json.Unmarshal(line, &said)
}

func (p *llguidance) close() error {
	p.in.Close()
	return p.cmd.Wait()
}
