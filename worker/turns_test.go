package worker_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/worker"
)

// TestNextTurn: a proxy of several turns shows the next prefill what decode's answer said, and that
// prefill, which has nothing cached, finds the conversation's beginning there.
func TestNextTurn(t *testing.T) {
	p, d := pair(t, nil)
	const first = `"prompt":"` + "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big dog and a small cat." +
		`","max_tokens":40,"min_tokens":40,"temperature":0,"return_token_ids":true`
	kept, _ := nixl(t, p, first)
	one := complete(t, d, nil, "{"+first+transfer(t, kept)+"}")
	if one.KV["do_remote_decode"] != true || one.KV["do_remote_prefill"] != false || one.KV["remote_engine_id"] != fmt.Sprintf("%s@%d", d.ID(), d.Instance().Epoch) ||
		one.KV["remote_num_tokens"] != float64(one.Usage.Prompt+39) || one.KV["remote_request_id"] == "" {
		t.Errorf("%v", one.KV)
	}
	said := append(one.Choices[0].PromptTokenIDs, one.Choices[0].TokenIDs...)
	fresh := func() *worker.Worker {
		return start(t, func(c *worker.Config) { c.Role = string(fleet.Prefill) })
	}
	alone := start(t, nil)
	f := func(how string, history []int32, least, most int, change func(m map[string]any)) {
		t.Helper()
		ids, err := json.Marshal(append(append([]int32{}, history...), 403, 404, 405))
		if err != nil {
			t.Fatal(err)
		}
		params := maps.Clone(one.KV)
		change(params)
		next := fresh()
		body := fmt.Sprintf(`"prompt":%s,"max_tokens":8,"temperature":0`, ids)
		resp, b := ask(t, next.URL()+"/v1/completions", nil, "{"+strings.Replace(body, `"max_tokens":8`, `"max_tokens":1`, 1)+transfer(t, params)+"}")
		var a answer
		if err := json.Unmarshal(b, &a); err != nil || resp.StatusCode != 200 {
			t.Fatalf("%s: %d %s", how, resp.StatusCode, b)
		}
		if n := a.Usage.Details.Cached; n < least || n > most {
			t.Errorf("%s: %d of %d tokens were found, want %d to %d", how, n, len(history)+3, least, most)
		}
		same(t, how, complete(t, d, nil, "{"+body+transfer(t, a.KV)+"}"), complete(t, alone, nil, "{"+body+"}"))
		empty(t, next)
		empty(t, d)
	}
	whole := (len(said) - 1) / 16 * 16
	f("the next turn", said, whole, whole, func(map[string]any) {})
	f("not shown", said, 0, 0, func(m map[string]any) {
		clear(m)
		m["do_remote_decode"] = true
	})
	// A client that leaves part of an answer out has less in common with it, and gets nothing wrong.
	cut := append(append([]int32{}, said[:one.Usage.Prompt+3]...), said[one.Usage.Prompt+9:]...)
	common := (one.Usage.Prompt + 3) / 16 * 16
	f("a part left out", cut, common, common, func(map[string]any) {})
	cut = append(append([]int32{}, said[:one.Usage.Prompt+3]...), said[one.Usage.Prompt+11:]...) // decode has the other now
	f("without a place to ask", cut, 0, common, func(m map[string]any) { delete(m, "remote_url") })
	f("of a former run", said, 0, 0, func(m map[string]any) { m["remote_engine_id"] = d.ID() + "@1" })
	f("of no worker of ours", said, 0, 0, func(m map[string]any) { m["remote_engine_id"] = "vllm" })
	f("a stranger", said, 0, 0, func(m map[string]any) { m["remote_host"] = "192.0.2.1" })
	f("no tokens", said, 0, 0, func(m map[string]any) { m["remote_num_tokens"] = -1 })
	f("no port", said, 0, 0, func(m map[string]any) { m["remote_port"] = -1 })
	f("more than there is", said, 0, whole, func(m map[string]any) { m["remote_num_tokens"] = 1 << 40 })
	empty(t, p)
}

// TestTurnsTold: decode says where its KV is to who asked with kv_transfer_params, once, at the end.
func TestTurnsTold(t *testing.T) {
	p, d := pair(t, nil)
	const body = `"prompt":"Once upon a time","max_tokens":6,"temperature":0`
	kept, _ := nixl(t, p, body)
	list := events(t, d, "{"+body+`,"stream":true`+transfer(t, kept)+"}")
	for i, e := range list {
		var chunk answer
		if err := json.Unmarshal([]byte(e), &chunk); err != nil {
			continue // [DONE]
		}
		if ends := len(chunk.Choices) > 0 && chunk.Choices[0].Finish != nil; ends != (chunk.KV != nil) {
			t.Errorf("event %d of %d: %s", i, len(list), e)
		}
	}
	if !strings.Contains(strings.Join(list, ""), `"remote_num_tokens":10`) {
		t.Errorf("%v", list)
	}
	f := func(fields string) {
		t.Helper()
		if a := complete(t, d, nil, "{"+body+fields+"}"); a.KV != nil {
			t.Errorf("%s: %v", fields, a.KV)
		}
	}
	f("")
	f(`,"kv_transfer_params":{}`)
	kept, _ = nixl(t, p, body+`,"n":2`)
	f(`,"n":2` + transfer(t, kept))

	talker := talking(t)
	p, d = pair(t, func(p, d *worker.Config) { p.Model, d.Model = talker, talker })
	const chat = `{"messages":[{"role":"user","content":"hi"}],"max_tokens":3,"kv_transfer_params":`
	_, b := ask(t, p.URL()+"/v1/chat/completions", nil, chat+`{"do_remote_decode":true}}`)
	var a answer
	if err := json.Unmarshal(b, &a); err != nil || a.KV == nil {
		t.Fatalf("%s", b)
	}
	params, err := json.Marshal(a.KV)
	if err != nil {
		t.Fatal(err)
	}
	_, b = ask(t, d.URL()+"/v1/chat/completions", nil, strings.Replace(chat, `"messages"`, `"stream":true,"messages"`, 1)+string(params)+"}")
	if parts := strings.Split(strings.TrimSpace(string(b)), "\n\n"); len(parts) < 2 || !strings.Contains(parts[len(parts)-2], `"do_remote_decode":true`) || strings.Count(string(b), "kv_transfer_params") != 1 {
		t.Errorf("%s", b)
	}
	empty(t, p)
	empty(t, d)
}

// TestReusedPrompt: the prompt that a proxy passes on from prefill is taken as it is, whatever the
// messages say.
func TestReusedPrompt(t *testing.T) {
	talker := talking(t)
	w := start(t, func(c *worker.Config) { c.Model = talker })
	chat := func(text, fields string) (int, string) {
		resp, b := ask(t, w.URL()+"/v1/chat/completions", nil, fmt.Sprintf(`{"messages":[{"role":"user","content":%q}],"max_tokens":4,"temperature":0,"return_token_ids":true%s}`, text, fields))
		return resp.StatusCode, string(b)
	}
	read := func(body string) (ids []int32, text string) {
		t.Helper()
		var a struct {
			IDs     []int32 `json:"prompt_token_ids"`
			Choices []struct{ Message struct{ Content string } }
		}
		if err := json.Unmarshal([]byte(body), &a); err != nil || len(a.Choices) != 1 {
			t.Fatalf("%v: %s", err, body)
		}
		return a.IDs, a.Choices[0].Message.Content
	}
	_, b := chat("Once upon a time", "")
	ids, text := read(b)
	list, err := json.Marshal(ids)
	if err != nil {
		t.Fatal(err)
	}
	reused := `,"kv_transfer_params":{"prompt_token_ids":` + string(list) + `}`
	_, b = chat("another text", reused)
	if got, said := read(b); !slices.Equal(got, ids) || said != text {
		t.Errorf("%v %q, want %v %q", got, said, ids, text)
	}
	if status, b := chat("another text", reused+`,"stream":true`); status != 200 || !strings.Contains(b, `"prompt_token_ids":`+string(list)) {
		t.Errorf("%d %s", status, b)
	}
	_, b = chat("another text", reused+`,"echo":true`)
	if got, _ := read(b); slices.Equal(got, ids) {
		t.Errorf("with echo: %v", got)
	}
	for _, bad := range []string{`[]`, `["a"]`, `[1.5]`, `[-1]`, `[1e12]`, `[2147483647]`, `"a"`, `{}`} {
		if status, b := chat("x", `,"kv_transfer_params":{"prompt_token_ids":`+bad+`}`); status != 400 {
			t.Errorf("%s: %d %s", bad, status, b)
		}
	}
	empty(t, w)
}
