package chat_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"

	"github.com/xpyd/xpyd/internal/chat"
)

func TestConversation(t *testing.T) {
	f := func(build func(c *chat.Conversation), want string) {
		t.Helper()
		var c chat.Conversation
		build(&c)
		got := string(c.Append(nil))
		if got != want || !json.Valid([]byte(got)) {
			t.Errorf("\n got %s\nwant %s", got, want)
		}
	}
	text := func(s string) chat.Part { return chat.Part{Text: chat.Text(s)} }
	image := chat.Part{URL: chat.Text("http://h/i"), Detail: chat.Text("low")}
	call := chat.Call{ID: chat.Text("c1"), Name: chat.Text("f"), Arguments: chat.Plain(`{"a":"b"}`)}
	f(func(*chat.Conversation) {}, `[]`)
	f(func(c *chat.Conversation) { c.System(chat.Text("a")); c.System(chat.Text(`b\"`)); c.User(text("c")) },
		`[{"role":"system","content":"a\nb\""},{"role":"user","content":"c"}]`)
	f(func(c *chat.Conversation) { c.User(text("a")); c.System(chat.Text("b")) }, `[{"role":"user","content":"a"},{"role":"system","content":"b"}]`)
	f(func(c *chat.Conversation) { c.User(text("a"), text("b")) }, `[{"role":"user","content":"a\nb"}]`)
	f(func(c *chat.Conversation) { c.User() }, `[{"role":"user","content":""}]`)
	f(func(c *chat.Conversation) { c.User(text("a"), image) },
		`[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"http://h/i","detail":"low"}}]}]`)
	f(func(c *chat.Conversation) {
		c.Reason(chat.Text("r"))
		c.Say(chat.Text("s"))
		c.Call(call)
		c.Result(chat.Text("c1"), text("x"))
	},
		`[{"role":"assistant","content":"s","reasoning_content":"r","tool_calls":[{"type":"function","id":"c1","function":{"name":"f","arguments":"{\"a\":\"b\"}"}}]},`+
			`{"role":"tool","tool_call_id":"c1","content":"x"}]`)
	f(func(c *chat.Conversation) { c.Say(chat.Text("a")); c.EndText(); c.Say(chat.Text("b")) }, `[{"role":"assistant","content":"a"},{"role":"assistant","content":"b"}]`)
	f(func(c *chat.Conversation) { c.Say(chat.Text("a")); c.EndText(); c.Call(call); c.Call(call) },
		`[{"role":"assistant","content":"a","tool_calls":[{"type":"function","id":"c1","function":{"name":"f","arguments":"{\"a\":\"b\"}"}},{"type":"function","id":"c1","function":{"name":"f","arguments":"{\"a\":\"b\"}"}}]}]`)
	f(func(c *chat.Conversation) { c.Say(chat.Text("a")); c.Reason(chat.Text("r")) }, `[{"role":"assistant","content":"a"},{"role":"assistant","content":"","reasoning_content":"r"}]`)
	f(func(c *chat.Conversation) {
		c.Result(chat.Text("c1"), image, text("x"))
		c.Result(chat.Text("c2"))
		c.Say(chat.Text("s"))
	},
		`[{"role":"tool","tool_call_id":"c1","content":"x"},{"role":"tool","tool_call_id":"c2","content":""},`+
			`{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://h/i","detail":"low"}}]},{"role":"assistant","content":"s"}]`)
	f(func(c *chat.Conversation) { c.Result(chat.Text("c1"), image); c.User(text("u")) },
		`[{"role":"tool","tool_call_id":"c1","content":""},{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://h/i","detail":"low"}},{"type":"text","text":"u"}]}]`)
	f(func(c *chat.Conversation) { c.Result(chat.Text("c1"), image) },
		`[{"role":"tool","tool_call_id":"c1","content":""},{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://h/i","detail":"low"}}]}]`)
}

func TestEnds(t *testing.T) {
	var c chat.Conversation
	if !c.Empty() || c.Goes() {
		t.Error("nobody has said anything")
	}
	c.System(chat.Text("s"))
	if !c.Empty() {
		t.Error("a system message alone asks nothing")
	}
	c.Say(chat.Text("a"))
	if c.Empty() || !c.Goes() {
		t.Error("an assistant's text is to be gone on with")
	}
	c.Call(chat.Call{})
	if c.Goes() {
		t.Error("a call is not gone on with")
	}
	for _, add := range []func(c *chat.Conversation){
		func(c *chat.Conversation) { c.User(chat.Part{}, chat.Part{}) },
		func(c *chat.Conversation) { c.System(chat.Text("a")) },
		func(c *chat.Conversation) { c.Reason(chat.Text("a")) },
		func(c *chat.Conversation) { c.Say(chat.Text("a")) },
		func(c *chat.Conversation) { c.Call(chat.Call{}) },
		func(c *chat.Conversation) { c.Result(chat.Text("a")) },
	} {
		var c chat.Conversation
		for n := 0; !c.Full(); n++ {
			if add(&c); n > chat.MaxMessages {
				t.Fatal("there is no end to it")
			}
		}
	}
}

// TestMost: a conversation that is larger than it may be is full, though its texts may be one in memory.
func TestMost(t *testing.T) {
	text, many := chat.Text(strings.Repeat("a", 1000)), 0
	for _, add := range []func(c *chat.Conversation){
		func(c *chat.Conversation) { c.User(chat.Part{URL: text}) },
		func(c *chat.Conversation) { c.System(text) },
		func(c *chat.Conversation) { c.Reason(text) },
		func(c *chat.Conversation) { c.Say(text) },
		func(c *chat.Conversation) { c.Call(chat.Call{Arguments: text}) },
		func(c *chat.Conversation) { c.Result(text, chat.Part{Text: text}) },
	} {
		c := chat.Conversation{Most: 9500}
		for many = 0; !c.Full() && many < 20; many++ {
			add(&c)
		}
		if many != 10 {
			t.Errorf("%d of them", many)
		}
	}
}

func TestRequest(t *testing.T) {
	var r chat.Request
	r.Set("a", []byte("1"))
	r.Set("b", []byte("2"))
	r.Set("a", []byte("3"))
	r.Set("c", nil)
	r.SetText("d", chat.Text(`x\n`))
	var c chat.Conversation
	if got := string(r.Append(nil, &c)); got != `{"b":2,"a":3,"d":"x\n","messages":[]}` {
		t.Error(got)
	}
	if got := string(r.Only("a", "z").Append(nil, &c)); got != `{"a":3,"messages":[]}` {
		t.Error(got)
	}
	r.Set("b", nil)
	if got := string(r.Append(nil, &c)); got != `{"a":3,"d":"x\n","messages":[]}` {
		t.Error(got)
	}
}

func TestRead(t *testing.T) {
	f := func(data, want string) {
		t.Helper()
		var a chat.Answer
		ok := chat.Read([]byte(data), &a)
		said := []string{}
		for _, v := range []struct {
			name string
			t    chat.Text
		}{{"model", a.Model}, {"reasoning", a.Reasoning}, {"content", a.Content}, {"refusal", a.Refusal}, {"logprobs", a.Logprobs}, {"finish", a.Finish}, {"stop", a.Stop}} {
			if len(v.t) > 0 {
				said = append(said, v.name+"="+string(v.t))
			}
		}
		for _, c := range a.Calls {
			said = append(said, "call="+string(rune('0'+c.Index))+"/"+string(c.ID)+"/"+string(c.Name)+"/"+string(c.Arguments))
		}
		if a.Told {
			b, _ := json.Marshal(a.Usage)
			said = append(said, string(b))
		}
		if a.Error != nil {
			said = append(said, a.Error.Error())
		}
		if !ok {
			said = append(said, "NONE")
		}
		if got := strings.Join(said, " "); got != want {
			t.Errorf("%s\n got %s\nwant %s", data, got, want)
		}
	}
	f(`{"model":"m","choices":[{"message":{"content":"a\"b","reasoning_content":"r","reasoning":"r","tool_calls":null},"finish_reason":"stop","stop_reason":null}],"usage":{"prompt_tokens":3,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1},"completion_tokens_details":{"reasoning_tokens":1}}}`,
		`model=m reasoning=r content=a\"b finish=stop {"Prompt":3,"Cached":1,"Created":0,"Completion":2,"Reasoning":1}`)
	f(`{"choices":[{"delta":{"role":"assistant","content":null,"reasoning":"x","reasoning_content":null}}]}`, `reasoning=x`)
	f(`{"choices":[{"delta":{"tool_calls":[{"index":1,"id":"i","type":"function","function":{"name":"f","arguments":"{"}},{"function":{"arguments":"}"}}]},"finish_reason":"tool_calls","matched_stop":"</s>"}]}`,
		`finish=tool_calls stop=</s> call=1/i/f/{ call=1///}`)
	f(`{"choices":[{"delta":{"content":"a"},"stop_reason":17,"logprobs":{"content":[ {"token":"a"} ],"refusal":null}},{"delta":{"content":"second"}}]}`, `content=a logprobs={"token":"a"}`)
	f(`{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":-2,"prompt_tokens_details":{"cached_tokens":9},"completion_tokens_details":null}}`, `{"Prompt":3,"Cached":3,"Created":0,"Completion":0,"Reasoning":0}`)
	f(`{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"created_cache_tokens":4,"cached_tokens":3,"other":[1]}}}`, `{"Prompt":9,"Cached":3,"Created":4,"Completion":1,"Reasoning":0}`)
	f(`{"choices":[],"usage":{"prompt_tokens":5,"prompt_tokens_details":{"created_cache_tokens":4,"cached_tokens":3}}}`, `{"Prompt":5,"Cached":3,"Created":2,"Completion":0,"Reasoning":0}`)
	f(`{"choices":null,"usage":null}`, ``)
	f(`{"error":{"message":"no","type":"server_error","code":"unavailable"}}`, `503 no`)
	f(`{"error":{"message":"no","type":"BadRequestError","code":400}}`, `400 no`)
	f(`{"object":"error","message":"no"}`, `500 no`)
	f(`{"error":null,"choices":[]}`, ``)
	f(`{"whole":true}`, `NONE`)
	f(`[1]`, `NONE`)
	f(`{"choices":[{"delta":{"content":"a"`, `content=a NONE`)
	f(`{"choices":[3,{}],"model":1,"usage":[]}`, ``)
}

func TestEvents(t *testing.T) {
	f := func(run string, want ...string) {
		t.Helper()
		var got []string
		for data := range chat.Events([]byte(run)) {
			got = append(got, string(data))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", run, got, want)
		}
	}
	f("data: {\"a\":1}\n\ndata:[DONE]\n\n", `{"a":1}`, "[DONE]")
	f("event: x\r\nid: 1\r\ndata: a\r\n\r\n: data: no\r\n\r\n", "a")
	f("data: a\r\rdata: b\r\r", "a", "b")
	f(": xpyd seam\n\n")
	f("data:\n\ndata: \n\n")
	f("data: a", "a")
	for range chat.Events([]byte("data: a\n\ndata: b\n\n")) {
		break
	}
	if !chat.IsDone([]byte("[DONE]")) || chat.IsDone([]byte("{}")) {
		t.Error("IsDone")
	}
}

// TestRecorded: what OpenAI has sent is read whole.
func TestRecorded(t *testing.T) {
	files, err := filepath.Glob("../openai/testdata/sse/*.sse")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		body, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var a chat.Answer
		text, calls, finish, told := "", "", "", false
		for data := range chat.Events(body) {
			if chat.IsDone(data) {
				break
			}
			if !chat.Read(data, &a) || a.Error != nil {
				t.Fatalf("%s: %s", file, data)
			}
			text += string(a.Content)
			for _, c := range a.Calls {
				calls += string(c.Name) + string(c.Arguments)
			}
			finish += string(a.Finish)
			told = told || a.Told
		}
		if finish == "" || !told || text == "" && calls == "" {
			t.Errorf("%s: %q %q %q %t", file, text, calls, finish, told)
		}
	}
}

// FuzzRead: whatever engines send, a text that is read is part of it and stays one JSON string's body.
func FuzzRead(f *testing.F) {
	for _, seed := range []string{`{"choices":[{"delta":{"content":"a\u00e4"}}]}`, `{"choices":[{"message":{"tool_calls":[{"function":{"name":"f","arguments":"{}"}}]}}]}`,
		`{"error":{"message":1}}`, `{"choices":[{"logprobs":{"content":[{"a":1}]}}],"usage":{"prompt_tokens":1e3}}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var a chat.Answer
		if !chat.Read(data, &a) {
			return
		}
		texts := []chat.Text{a.Model, a.Reasoning, a.Content, a.Refusal, a.Finish, a.Stop}
		for _, c := range a.Calls {
			texts = append(texts, c.ID, c.Name, c.Arguments)
		}
		for _, text := range texts {
			if !json.Valid(slices.Concat([]byte{'"'}, text, []byte{'"'})) {
				t.Fatalf("%q of %q", text, data)
			}
		}
		if !json.Valid(slices.Concat([]byte{'['}, a.Logprobs, []byte{']'})) {
			t.Fatalf("%q of %q", a.Logprobs, data)
		}
		if a.Usage.Cached > a.Usage.Prompt || a.Usage.Reasoning > a.Usage.Completion {
			t.Fatalf("%+v of %q", a.Usage, data)
		}
	})
}

// TestToolNames: no two tools have one name, and there are not too many.
func TestToolNames(t *testing.T) {
	var r openai.Reader
	names := chat.ToolNames{}
	for i := range openai.MaxTools {
		names.Add(&r, fmt.Sprintf("tools[%d]", i), fmt.Sprintf(`"f%d"`, i))
	}
	if r.Err() != nil {
		t.Fatal(r.Err())
	}
	names.Add(&r, "tools[128]", `"g"`)
	if e := r.Fault(); e == nil || e.Param != "tools" {
		t.Errorf("%v", e)
	}
	for param, want := range map[string]string{"tools[3].function.parameters": "tools[3].schema", "tools[3].function.name": "tools[3].name", "tools": "tools", "x.function.y": "x.function.y"} {
		if e := chat.OwnTool(openai.BadRequest(param, "%s is bad", param), "schema"); e.Param != want || e.Message != want+" is bad" {
			t.Errorf("%s: %+v", param, e)
		}
	}
}
