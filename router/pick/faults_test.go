package pick_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/router/pick"
)

// Rows of ../FAULTS.md that are a matter of the choice alone.

// TestFaultC10_LiveCountsAreNotSwept: however long a request takes, and whatever
// is looked at meanwhile, its load counts until it ends.
func TestFaultC10_LiveCountsAreNotSwept(t *testing.T) {
	l := newLab(t, fleetOf(1, 1))
	c := l.pick()
	want := l.p.Loads("d0", 1)
	for range 48 {
		l.now = l.now.Add(time.Hour)
		l.p.Refresh(pick.View{Snapshot: l.s, Now: l.now, Generation: uint64(l.now.Unix())})
		l.p.Judge(l.now)
		l.p.Events()
		if got := l.p.Loads("d0", 1); got != want || got.Legs != 1 {
			t.Fatalf("%+v became %+v", want, got)
		}
	}
	l.good(c)
	for _, id := range []string{"p0", "d0"} {
		if got := l.p.Loads(id, 1); got != (pick.Loads{}) {
			t.Errorf("%s still has %+v", id, got)
		}
	}
}

// TestFaultC16_ColdPromptsFollowLoad: among workers with nothing of the prompt cached the
// least loaded is chosen, and of equals the one idle longest, not by order or size.
func TestFaultC16_ColdPromptsFollowLoad(t *testing.T) {
	cold := func(i int) pick.Request {
		text := strings.Repeat(fmt.Sprintf("%03d|", i), 3000)
		return pick.Request{Tokens: len(text) / 4, Output: 1, Chain: pick.NewChain([]byte(text))}
	}
	p, s := newPicker(pick.Prefix), fleetOf(3, 3)
	used := map[string]int{}
	var held []*pick.Choice
	for i := range 30 { // 32k in and 1 out, all at once
		c := mustPick(t, p, s, cold(i))
		used[c.Prefill.ID]++
		held = append(held, c)
	}
	for _, c := range held {
		end(c)
	}
	for i := range 30 { // one after another
		c := mustPick(t, p, s, cold(100+i))
		used[c.Prefill.ID]++
		end(c)
	}
	for id, n := range used {
		if n < 14 || n > 26 {
			t.Errorf("%s got %d of 60: %v", id, n, used)
		}
	}
}

// TestFaultC18_IndexKeepsItsBudget: prompts without end, in trees that split at
// every depth, take no more memory than they may.
func TestFaultC18_IndexKeepsItsBudget(t *testing.T) {
	const budget = 1 << 20 // newPicker's
	p, s := newPicker(pick.Prefix), fleetOf(2, 2)
	for i := range 20000 {
		text := strings.Repeat("shared ", i%97) + strings.Repeat(fmt.Sprintf("own %d ", i), 20)
		end(mustPick(t, p, s, pick.Request{Tokens: len(text) / 4, Chain: pick.NewChain([]byte(text))}))
		if n := p.AffinityBytes(); n > budget {
			t.Fatalf("%d bytes after %d prompts", n, i+1)
		}
	}
}

// TestFaultC24_KeyIsTheWholePrompt: what is cached is judged by all of the
// prompt: neither by its first message, nor by its length.
func TestFaultC24_KeyIsTheWholePrompt(t *testing.T) {
	match := func(first, second string) float64 {
		p, s := newPicker(pick.Prefix), fleetOf(1, 1)
		end(mustPick(t, p, s, pick.Request{Tokens: len(first) / 4, Chain: pick.NewChain([]byte(first))}))
		c := mustPick(t, p, s, pick.Request{Tokens: len(second) / 4, Explain: true, Chain: pick.NewChain([]byte(second))})
		defer end(c)
		return c.Explain.Prefill[0].Match
	}
	turn := func(who, text string) string {
		return fmt.Sprintf(`{"role":%q,"content":%q}`, who, strings.Repeat(text, 300))
	}
	first := "[" + turn("user", "the same question ")
	a, b := first+","+turn("assistant", "one answer ")+"]", first+","+turn("assistant", "another answer ")+"]"
	if m := match(a, a); m < 0.99 {
		t.Errorf("the same conversation matches %v", m)
	}
	if m := match(a, b); m < 0.3 || m > 0.8 {
		t.Errorf("conversations with the same first message match %v", m)
	}
	ids := func(from int) string {
		var out []string
		for i := range 1000 {
			out = append(out, fmt.Sprint(from+i))
		}
		return "[" + strings.Join(out, ",") + "]"
	}
	if m := match(ids(1000), ids(5000)); m > 0.05 {
		t.Errorf("token prompts of one length match %v", m)
	}
	if m := match(strings.Repeat(`{"session_id":"x"} A `, 100), strings.Repeat(`{"session_id":"x"} B `, 100)); m > 0.1 {
		t.Errorf("prompts that talk about the same session match %v", m)
	}
}
