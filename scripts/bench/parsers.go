package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/answer"
	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/tokenizer"
)

// parsersBench reads the texts of SMG's tests of parsers with internal/answer, and compares.
type parsersBench struct {
	base
	smg, tokenizer string
	tok            *tokenizer.Tokenizer
}

func (b *parsersBench) flags(f *flag.FlagSet) {
	f.StringVar(&b.smg, "smg", "", "folder of the repository lightseekorg/smg")
	f.StringVar(&b.tokenizer, "tokenizer", "", "folder of a tokenizer.json: texts are cut into its tokens")
}

func (b *parsersBench) parts() []part {
	return []part{{"vectors", b.vectors}, {"speed", b.speed}}
}

func (b *parsersBench) open(context.Context) (err error) {
	if b.smg == "" || b.tokenizer == "" {
		return errors.New("-smg and -tokenizer are needed")
	}
	b.tok, err = tokenizer.Load(b.tokenizer)
	return err
}

// smgParsers are our formats by SMG's names.
var smgParsers = map[string]struct {
	tool, think string
	thinking    bool
}{
	"QwenXmlParser::new": {tool: "qwen3_coder"}, "QwenParser::new": {tool: "hermes"}, "JsonParser::new": {tool: "json"}, "LlamaParser::new": {tool: "llama3_json"},
	"MistralParser::new": {tool: "mistral"}, "PythonicParser::new": {tool: "pythonic"}, "DeepSeekParser::new": {tool: "deepseek_v3"},
	"DeepSeek31Parser::new": {tool: "deepseek_v31"}, "DeepSeekDsmlParser::v32": {tool: "deepseek_v32"}, "DeepSeekDsmlParser::v4": {tool: "deepseek_v4"},
	"Glm4MoeParser::glm45": {tool: "glm45"}, "Glm4MoeParser::glm47": {tool: "glm45"}, "KimiK2Parser::new": {tool: "kimi_k2"},
	"MinimaxM2Parser::new": {tool: "minimax_m2"}, "Step3Parser::new": {tool: "step3"}, "CohereParser::new": {tool: "cohere"},

	"Qwen3Parser::new": {think: "qwen3"}, "QwenThinkingParser::new": {think: "qwen3", thinking: true}, "DeepSeekR1Parser::new": {think: "deepseek_r1"},
	"KimiParser::new": {think: "kimi"}, "Glm45Parser::new": {think: "glm45"}, "Step3Parser::think": {think: "step3"}, "MiniMaxParser::new": {think: "minimax_m2"},
	"NanoV3Parser::new": {think: "nemotron"}, "CohereCmdParser::new": {think: "cohere"},
}

// outcome is what a text is read as.
type outcome struct {
	text, reasoning string
	names, args     []string
}

func (b *parsersBench) read(v *vector, whole bool, pieces []string) (o outcome) {
	name := v.parser
	if v.reasoning && name == "Step3Parser::new" {
		name = "Step3Parser::think"
	}
	how := smgParsers[name]
	p := answer.New(answer.ToolFormat(how.tool), answer.ThinkFormat(how.think), answer.Options{Whole: whole, Thinking: how.thinking || v.started})
	take := func(events []answer.Event) {
		for _, e := range events {
			switch e.Kind {
			case answer.Content:
				o.text += e.Text
			case answer.Reasoning:
				o.reasoning += e.Text
			case answer.Begin:
				o.names, o.args = append(o.names, e.Text), append(o.args, "")
			case answer.Arguments:
				o.args[len(o.args)-1] += e.Text
			}
		}
	}
	for _, s := range pieces {
		take(p.Feed(s))
	}
	take(p.Flush())
	return o
}

// differs says what of a vector is not so; "": all is.
func (v *vector) differs(o outcome) string {
	for _, c := range v.claims {
		var got any
		switch {
		case c.what == "calls":
			got = float64(len(o.names))
		case c.what == "text":
			got = o.text
		case c.what == "reasoning":
			got = o.reasoning
		case c.call >= len(o.names):
			got = "no such call"
		case c.what == "name":
			got = o.names[c.call]
		default:
			_ = json.Unmarshal([]byte(o.args[c.call]), &got)
			for _, at := range c.path {
				got = member(got, at)
			}
		}
		text, ok := got.(string)
		if trimmed := strings.TrimSpace(text); ok && v.reasoning && trimmed == c.want { // SMG takes white space off
			got = trimmed
		}
		if !reflect.DeepEqual(got, c.want) {
			return fmt.Sprintf("%s %v is %q, want %q", c.what, c.path, fmt.Sprint(got), fmt.Sprint(c.want))
		}
	}
	return ""
}

func member(v, at any) any {
	switch at := at.(type) {
	case string:
		object, _ := v.(map[string]any)
		return object[at]
	case int:
		if list, _ := v.([]any); at < len(list) {
			return list[at]
		}
	}
	return nil
}

func (b *parsersBench) vectors(context.Context) error {
	all, err := readSMG(b.smg)
	if err != nil {
		return err
	}
	unknown, silent := 0, 0
	list := slices.DeleteFunc(all, func(v vector) bool {
		name := v.parser
		switch _, ok := smgParsers[name]; {
		case !ok:
			unknown++
			return true
		case len(v.claims) == 0:
			silent++
			return true
		}
		return false
	})
	b.Sayf("%d vectors; %d are of formats that are not known here, and %d say nothing that is understood", len(list), unknown, silent)
	ways := []struct {
		name   string
		whole  bool
		pieces func(string) []string
	}{
		{"whole", true, func(s string) []string { return []string{s} }},
		{"bytes", false, func(s string) (out []string) {
			for i := range len(s) {
				out = append(out, s[i:i+1])
			}
			return out
		}},
		{"tokens", false, func(s string) (out []string) {
			for _, id := range b.tok.Encode(s, false) {
				out = append(out, string(b.tok.TokenBytes(id)))
			}
			return out
		}},
	}
	for _, w := range ways {
		good, other := 0, 0
		for i := range list {
			v := &list[i]
			pieces := w.pieces(v.text)
			if strings.Join(pieces, "") != v.text {
				return fmt.Errorf("%s: the tokens are another text", v.name)
			}
			why := v.differs(b.read(v, w.whole, pieces))
			reason := onPurpose[v.name]
			switch {
			case why == "":
				good++
			case reason != "":
				other++
				b.Book.Logf("%s, %s: %s: on purpose: %s", w.name, v.name, why, reason)
			default:
				b.Sayf("%s, %s (%s): %s: %q", w.name, v.name, v.parser, why, v.text)
			}
		}
		if err := b.Add(figures.Figure{Name: "door.parser_vectors_pct." + w.name, Value: 100 * float64(good) / float64(len(list)), Unit: "%", Peer: "SMG's own parsers", PeerValue: 100, Runs: 1,
			Spread: fmt.Sprintf("%d of %d as SMG's tests have it, %d otherwise on purpose, each in the log; %d of formats that are not known here", good, len(list), other, unknown),
			Model:  "texts of crates/tool_parser and crates/reasoning_parser of lightseekorg/smg"}); err != nil {
			return err
		}
	}
	return nil
}

// speed reads the texts again and again, token by token.
func (b *parsersBench) speed(context.Context) error {
	all, err := readSMG(b.smg)
	if err != nil {
		return err
	}
	var list []vector
	var cut [][]string
	tokens := 0
	for _, v := range all {
		if how, ok := smgParsers[v.parser]; !ok || how.tool == "" {
			continue
		}
		var pieces []string
		for _, id := range b.tok.Encode(v.text, false) {
			pieces = append(pieces, string(b.tok.TokenBytes(id)))
		}
		tokens += len(pieces)
		list, cut = append(list, v), append(cut, pieces)
	}
	var took []float64
	for range max(b.Rounds, 1) * 10 {
		begin := time.Now()
		for i := range list {
			b.read(&list[i], false, cut[i])
		}
		took = append(took, float64(time.Since(begin).Nanoseconds())/1e3/float64(tokens))
	}
	slices.Sort(took)
	return b.Add(figures.Figure{Name: "door.parser_us_per_token", Value: took[len(took)/2], Unit: "us a token", Peer: "wanted at most", PeerValue: 1, Runs: len(took),
		Spread: fmt.Sprintf("%.3f..%.3f", took[0], took[len(took)-1]), Model: fmt.Sprintf("%d texts of SMG's tests, %d tokens, parsers made anew, one thread", len(list), tokens)})
}

// Why a vector is read otherwise.
const (
	keepsText = "text between and behind calls is given; SMG drops it"
	keepsCall = "text behind a call does not undo it, as in vLLM"
	begun     = "a stream begins a call once its name is known, and this one breaks off later"
)

// onPurpose are SMG's vectors that are read otherwise, and why.
var onPurpose = map[string]string{
	"tool_parser_deepseek/test_deepseek_complete_parsing#1":       keepsText,
	"tool_parser_fallback/test_mixed_valid_and_invalid_content#1": keepsText,
	"tool_parser_glm47_moe/test_glm47_complete_parsing#1":         keepsText,
	"tool_parser_glm4_moe/test_glm4_complete_parsing#1":           keepsText,
	"tool_parser_kimik2/test_kimik2_complete_parsing#1":           keepsText,
	"tool_parser_minimax_m2/test_minimax_complete_parsing#1":      keepsText,
	"tool_parser_mistral/test_mistral_real_world_output#1":        keepsText,
	"tool_parser_qwen/test_qwen_with_text_between#1":              keepsText,
	"tool_parser_qwen/test_qwen_real_world_output#1":              keepsText,
	"tool_parser_step3/test_step3_complete_parsing#1":             keepsText,
	"tool_parser_step3/test_steptml_format#1":                     keepsText,

	"tool_parser_llama/test_json_with_trailing_text#1": keepsCall,

	"tool_parser_cohere/test_cohere_unclosed_string_does_not_false_terminate#1":         begun,
	"tool_parser_deepseek/test_deepseek_malformed_json_handling#1":                      begun,
	"tool_parser_fallback/test_qwen_parser_invalid_format_returns_as_normal_text#1":     begun,
	"tool_parser_fallback/test_mistral_parser_invalid_format_returns_as_normal_text#1":  begun,
	"tool_parser_fallback/test_deepseek_parser_invalid_format_returns_as_normal_text#1": begun,
	"tool_parser_fallback/test_almost_valid_tool_calls#1":                               begun,
	"tool_parser_json/test_json_invalid_format#1":                                       begun,
	"tool_parser_minimax_m2/test_minimax_incomplete_tool_call#1":                        begun,
	"tool_parser_qwen/test_qwen_incomplete_tags#1":                                      begun,
	"tool_parser_qwen_xml/test_qwen_xml_incomplete_tags#1":                              begun,
	"tool_parser_qwen_xml/test_qwen_xml_incomplete_tool_call#1":                         begun,
}
