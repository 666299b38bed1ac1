package chart

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// object has what these tests read of any kind of Kubernetes' objects.
type object struct {
	Kind     string
	Metadata struct{ Name, Namespace string }
	Data     map[string]string
	Spec     struct {
		Replicas int
		Template struct{ Spec pod }
	}
}

type pod struct {
	Grace      int `yaml:"terminationGracePeriodSeconds"`
	Containers []container
	Volumes    []struct {
		Name      string
		ConfigMap struct{ Name string } `yaml:"configMap"`
		Secret    struct {
			Name  string `yaml:"secretName"`
			Items []struct{ Key, Path string }
		}
	}
}

type container struct {
	Args []string
	Env  []struct {
		Name, Value string
		ValueFrom   struct {
			Field struct {
				Path string `yaml:"fieldPath"`
			} `yaml:"fieldRef"`
			Secret struct{ Name, Key string } `yaml:"secretKeyRef"`
		} `yaml:"valueFrom"`
	}
	Ports []struct {
		Name string
		Port int `yaml:"containerPort"`
	}
	Startup   probe `yaml:"startupProbe"`
	Liveness  probe `yaml:"livenessProbe"`
	Readiness probe `yaml:"readinessProbe"`
	Lifecycle struct {
		PreStop struct{ Sleep struct{ Seconds int } } `yaml:"preStop"`
	}
	Mounts []struct {
		Name string
		Path string `yaml:"mountPath"`
	} `yaml:"volumeMounts"`
}

type probe struct {
	HTTP struct{ Path, Port string } `yaml:"httpGet"`
}

// rendered reads what Helm made of a case.
func rendered(t *testing.T, path string) (all []object) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for dec := yaml.NewDecoder(bytes.NewReader(b)); ; {
		var o object
		err := dec.Decode(&o)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if o.Kind != "" {
			all = append(all, o)
		}
	}
}

// find returns the object of a kind and name; the zero one if there is none.
func find(all []object, kind, name string) object {
	for _, o := range all {
		if o.Kind == kind && o.Metadata.Name == name {
			return o
		}
	}
	return object{}
}

// cases are the rendered cases by their names.
func cases(t *testing.T) map[string][]object {
	t.Helper()
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) < 4 {
		t.Fatal(files, err)
	}
	out := map[string][]object{}
	for _, f := range files {
		out[strings.TrimSuffix(filepath.Base(f), ".yaml")] = rendered(t, f)
	}
	return out
}

// workloads are the objects that make pods.
func workloads(all []object) (out []object) {
	for _, o := range all {
		if o.Kind == "StatefulSet" || o.Kind == "Deployment" {
			out = append(out, o)
		}
	}
	return out
}
