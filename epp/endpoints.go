package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"syscall"

	"go.yaml.in/yaml/v3"

	"github.com/xpyd/xpyd/internal/fleet"
)

// endpoint is an engine as the file of endpoints has it.
type endpoint struct {
	Address string `yaml:"address"` // ip:port of its HTTP listener; its name, too
	Role    string `yaml:"role"`    // prefill, decode or both
	Model   string `yaml:"model"`   // what requests call it
}

const (
	maxFile      = 1 << 20
	maxEndpoints = 4096
)

// readEndpoints reads a file of endpoints. An error names the entry.
func readEndpoints(path string) ([]endpoint, error) {
	if info, err := os.Stat(path); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() { // reading a pipe would wait for its writer
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxFile {
		return nil, fmt.Errorf("%s has more than %d bytes", path, maxFile)
	}
	list, err := parseEndpoints(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return list, nil
}

func parseEndpoints(text []byte) ([]endpoint, error) {
	var file struct {
		Endpoints []endpoint `yaml:"endpoints"`
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	dec.KnownFields(true)
	if err := dec.Decode(&file); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if len(file.Endpoints) > maxEndpoints {
		return nil, fmt.Errorf("%d endpoints are more than %d", len(file.Endpoints), maxEndpoints)
	}
	seen := map[string]bool{}
	for i, e := range file.Endpoints {
		at, err := netip.ParseAddrPort(e.Address)
		switch {
		case err != nil || at.Port() == 0:
			return nil, fmt.Errorf("endpoints[%d].address %q: want ip:port", i, e.Address)
		case e.Role != "prefill" && e.Role != "decode" && e.Role != "both":
			return nil, fmt.Errorf("endpoints[%d].role %q: want prefill, decode or both", i, e.Role)
		case e.Model == "":
			return nil, fmt.Errorf("endpoints[%d].model is empty", i)
		case seen[e.Address]:
			return nil, fmt.Errorf("endpoints[%d].address %s is there twice", i, e.Address)
		}
		seen[e.Address] = true
	}
	return file.Endpoints, nil
}

// member is the endpoint as the choice sees it: an engine that serves alone, or half of a pair.
func (e *endpoint) member() fleet.Member {
	i := fleet.Instance{ID: e.Address, Epoch: 1, Role: fleet.Decode, URL: "http://" + e.Address, Dialect: "openai", Model: e.Model}
	if e.Role != "both" {
		i.Role, i.Dialect = fleet.Role(e.Role), "vllm-nixl" // what llm-d's sidecar speaks between the two
	}
	return fleet.Member{Instance: i, State: fleet.Suspect, Source: fleet.Static}
}
