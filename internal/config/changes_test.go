package config_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/config"
)

type changing struct {
	Listen string        `key:"listen"`
	Wait   time.Duration `key:"wait"`
	Key    string        `key:"key" secret:"true"`
	URL    string        `key:"url" secret:"url"`
	List   []struct {
		ID   string `key:"id"`
		Role string `key:"role"`
	} `key:"list"`
	Below struct {
		Queue int `key:"queue"`
	} `key:"below"`
	Many []int `key:"many"`
}

func TestChanges(t *testing.T) {
	f := func(change func(*changing), want ...string) {
		t.Helper()
		next := changing{Listen: "a", Key: "hunter2", URL: "nats://u:hunter2@h:1"}
		next.List = append(next.List, struct {
			ID   string `key:"id"`
			Role string `key:"role"`
		}{"x", "decode"})
		old := next
		old.List = slices.Clone(old.List)
		change(&next)
		got, err := config.Changes(&old, &next)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q, %v; want %q", got, err, want)
		}
		if strings.Contains(strings.Join(got, " "), "hunter") {
			t.Errorf("a secret shows: %q", got)
		}
	}
	f(func(*changing) {})
	f(func(c *changing) { c.Listen, c.Wait, c.Below.Queue = "", time.Second, 7 }, `listen: a -> ""`, "wait: 0s -> 1s", "below.queue: 0 -> 7")
	f(func(c *changing) { c.Key, c.URL = "hunter3", "nats://u:hunter3@h:2" }, "url: nats://u:********@h:1 -> nats://u:********@h:2")
	f(func(c *changing) { c.Key = "" }, `key: ******** -> ""`)
	f(func(c *changing) { c.List[0].Role = "prefill" }, "list[0].role: decode -> prefill")
	f(func(c *changing) { c.List = append(c.List, c.List[0]) }, "list[1]: none -> {id: x, role: decode}")
	f(func(c *changing) { c.List = nil }, "list[0]: {id: x, role: decode} -> none")
	f(func(c *changing) { c.Many = []int{4} }, "many[0]: none -> 4")

	many := changing{Many: make([]int, 100)}
	got, err := config.Changes(&changing{}, &many)
	if err != nil || len(got) != 33 || got[32] != "and 68 more" {
		t.Errorf("%d: %q %v", len(got), got[len(got)-1], err)
	}
}
