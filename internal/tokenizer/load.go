package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Load reads tokenizer.json and, if present, tokenizer_config.json and chat_template.jinja
// (which overrides the config's template) from a model directory in Hugging Face layout.
func Load(dir string) (*Tokenizer, error) {
	vocab, err := os.ReadFile(filepath.Join(dir, "tokenizer.json"))
	if err != nil {
		return nil, fmt.Errorf("load tokenizer: %w", err)
	}
	config, err := readOptional(filepath.Join(dir, "tokenizer_config.json"))
	if err != nil {
		return nil, fmt.Errorf("load tokenizer: %w", err)
	}
	t, err := FromJSON(vocab, config)
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", dir, err)
	}
	template, err := readOptional(filepath.Join(dir, "chat_template.jinja"))
	if err != nil {
		return nil, fmt.Errorf("load tokenizer: %w", err)
	}
	if template != nil {
		if t, err = t.WithChatTemplate(string(template)); err != nil {
			return nil, fmt.Errorf("load %s: chat_template.jinja: %w", dir, err)
		}
	}
	return t, nil
}

func readOptional(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

// hubConfig is the relevant part of a tokenizer_config.json.
type hubConfig struct {
	Class        string          `json:"tokenizer_class"`
	AddBOS       *bool           `json:"add_bos_token"`
	AddEOS       *bool           `json:"add_eos_token"`
	BOS          tokenName       `json:"bos_token"`
	EOS          tokenName       `json:"eos_token"`
	Unk          tokenName       `json:"unk_token"`
	Pad          tokenName       `json:"pad_token"`
	ChatTemplate json.RawMessage `json:"chat_template"`
}

// tokenName is a token written as a string, as {"content": …}, or null.
type tokenName string

func (n *tokenName) UnmarshalJSON(b []byte) error {
	var obj struct {
		Content string `json:"content"`
	}
	if len(b) > 0 && b[0] == '{' {
		err := json.Unmarshal(b, &obj)
		*n = tokenName(obj.Content)
		return err
	}
	return json.Unmarshal(b, (*string)(n))
}

// configure applies tokenizer_config.json; ids maps token spellings to ids.
func (t *Tokenizer) configure(raw []byte, ids func(string) (int32, bool)) error {
	if len(raw) == 0 {
		return nil
	}
	var c hubConfig
	if err := json.Unmarshal(raw, &c); err != nil {
		return fmt.Errorf("read tokenizer_config.json: %w", err)
	}
	if id, ok := ids(string(c.BOS)); ok && c.BOS != "" {
		t.bos, t.hasBOS = id, true
	}
	if id, ok := ids(string(c.EOS)); ok && c.EOS != "" {
		t.eos = []int32{id}
	}
	// The Llama tokenizer classes rebuild their post-processor from these two.
	if strings.HasPrefix(c.Class, "LlamaTokenizer") || strings.HasPrefix(c.Class, "CodeLlamaTokenizer") {
		if c.AddBOS != nil && t.hasBOS {
			t.prefix = nil
			if *c.AddBOS {
				t.prefix = []int32{t.bos}
			}
		}
		if c.AddEOS != nil && len(t.eos) > 0 {
			t.suffix = nil
			if *c.AddEOS {
				t.suffix = t.eos[:1:1]
			}
		}
	}
	sources, err := readTemplates(c.ChatTemplate)
	if err != nil {
		return fmt.Errorf("read tokenizer_config.json: %w", err)
	}
	t.chat = newChat(sources, map[string]string{
		"bos_token": string(c.BOS), "eos_token": string(c.EOS),
		"unk_token": string(c.Unk), "pad_token": string(c.Pad),
	})
	return nil
}

// readTemplates reads chat_template: a string, or a list of named ones.
func readTemplates(raw json.RawMessage) (map[string]string, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	var one string
	if raw[0] == '"' {
		err := json.Unmarshal(raw, &one)
		return map[string]string{defaultTemplate: one}, err
	}
	var list []struct{ Name, Template string }
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("chat_template: %w", err)
	}
	named := map[string]string{}
	for _, l := range list {
		named[l.Name] = l.Template
	}
	return named, nil
}
