package main

import (
	"bufio"
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/model"
)

func flowOf(t *testing.T, text string) (*flow, int, error) {
	t.Helper()
	f, met := &flow{}, 0
	err := f.read(&rawClient{r: bufio.NewReader(strings.NewReader(text))}, func(*flow) { met++ })
	if met != len(f.ids) || len(f.at) != met {
		t.Errorf("%d tokens, %d times, met %d", len(f.ids), len(f.at), met)
	}
	return f, met, err
}

// TestFlow: tokens are read from events, and put behind those of a stream that broke.
func TestFlow(t *testing.T) {
	const head = "HTTP/1.1 200 OK\r\nX-Xpyd-Decode: decode-0\r\n\r\n"
	event := func(ids string) string {
		return "data: {\"choices\":[{\"index\":0,\"text\":\"x\",\"token_ids\":[" + ids + "]}]}\n\n"
	}
	f, n, err := flowOf(t, head+event("5")+event("6,7")+": xpyd seam\n\n"+event("8")+event("")+"data: [DONE]\n\n")
	if err != nil || n != 4 || f.decode != "decode-0" || !slices.Equal(f.ids, []string{"5", "6", "7", "8"}) || !slices.Equal(f.seams, []int{3}) {
		t.Errorf("%+v, %v", f, err)
	}
	broke, _, err := flowOf(t, head+event("5")+event("6")+"data: {\"error\":{\"message\":\"gone\"}}\n\n")
	if err == nil || !strings.Contains(err.Error(), "gone") {
		t.Error(err)
	}
	f.decode, f.seams = "decode-1", nil
	all := f.behind(broke)
	if all.decode != "decode-0" || len(all.ids) != 4 || !slices.Equal(all.seams, []int{2}) || all.at[1] != broke.at[1] || all.at[2] != f.at[2] {
		t.Errorf("%+v", all)
	}
	if again := (&flow{}).behind(broke); again != broke {
		t.Errorf("what broke before it had more: %+v", again)
	}
	for _, text := range []string{"HTTP/1.1 503 x\r\n", head + event("5"), head + "data: {}\n\n"} {
		if _, _, err := flowOf(t, text); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
}

func TestPauses(t *testing.T) {
	p := pauses{all: []float64{3, 1, 2}, most: 4, took: time.Second}
	if p.p50() != 2 || p.p99() != 3 || !strings.Contains(p.String(), "1.0..3.0 ms") {
		t.Error(p)
	}
}

// TestEnlarged: a tokenizer gets as many tokens as the model has.
func TestEnlarged(t *testing.T) {
	tiny, err := model.Open(context.Background(), "", model.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer tiny.Close()
	text, _, _ := tiny.TokenizerFiles()
	text, err = enlarged(text, 600)
	var all struct {
		Model struct{ Vocab map[string]int }
	}
	if err != nil || json.Unmarshal(text, &all) != nil || len(all.Model.Vocab) != 600 || all.Model.Vocab["word599"] != 599 {
		t.Errorf("%v, %d tokens", err, len(all.Model.Vocab))
	}
	for _, text := range []string{"", "{}"} {
		if _, err := enlarged([]byte(text), 9); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
}
