package grammar

import (
	"fmt"
	"time"
)

// Error says why a grammar is refused: what the user has to mend.
type Error struct {
	Reason string // one sentence, lower case
	Where  string // a JSON pointer, or a position in the text; may be empty
}

func (e *Error) Error() string {
	if e.Where == "" {
		return e.Reason
	}
	return e.Where + ": " + e.Reason
}

// Limits bound what one grammar may cost. Zero fields mean the defaults.
type Limits struct {
	Bytes  int           // of the text; default 512 KiB
	States int           // steps of work while compiling, about a microsecond each; default 100,000, and 4 for each byte: whole automata get none for bytes
	Memory int64         // bytes of states and masks kept while running; default 64 MiB
	Time   time.Duration // of compiling, a backstop behind States; default 10 s
}

func (l Limits) withDefaults() Limits {
	if l.Bytes <= 0 {
		l.Bytes = 512 << 10
	}
	if l.States <= 0 {
		l.States = 100_000
	}
	if l.Memory <= 0 {
		l.Memory = 64 << 20
	}
	if l.Time <= 0 {
		l.Time = 10 * time.Second
	}
	return l
}

// maxRepeat bounds the numbers in {m,n}, minLength, maxItems and the like.
const maxRepeat = 10_000_000

// maxDepth bounds the nesting of a grammar's text, so that no walk over it runs out of stack.
const maxDepth = 500

// budget counts what compiling costs, and ends it by a panic with an *Error, which Compile
// catches: it can run out anywhere in the making of a node.
type budget struct {
	left     int
	automata int // of left, for whole automata: long texts have no claim to larger ones
	deadline time.Time
	ticks    int
	where    func() string // the place of what is being compiled; may be nil
}

func (b *budget) spend(n int) {
	b.left -= n
	b.ticks++
	if b.left < 0 {
		b.refuse("the grammar is too large: compiling it takes more work than it may")
	}
	if b.ticks&1023 == 0 && time.Now().After(b.deadline) {
		b.refuse("the grammar is too large: compiling it takes too long")
	}
}

// spendWhole is spend for work on whole automata.
func (b *budget) spendWhole(n int) {
	if b.automata -= n; b.automata < 0 {
		b.refuse("the grammar is too large: its patterns take more work than they may")
	}
	b.spend(n)
}

func (b *budget) bound(n int) {
	if n > maxRepeat {
		b.refuse("a repetition of more than %d times", maxRepeat)
	}
}

func (b *budget) refuse(format string, args ...any) {
	e := &Error{Reason: fmt.Sprintf(format, args...)}
	if b.where != nil {
		e.Where = b.where()
	}
	panic(e)
}
