// Package config loads a role's Config struct from its defaults, a YAML file, XPYD_*
// environment variables and flags; later ones win. Fields are found by their
// `key:"name"` tags. Unknown keys are refused, with their place.
//
// A field's type decides what is accepted: bool, integers, floats, strings, time.Duration
// ("3s"), Size ("64MiB"), types with UnmarshalText, and slices, pointers, structs and
// string-keyed maps of those.
//
// The variable of the key limits.max_body is XPYD_LIMITS_MAX_BODY or XPYD_LIMITS__MAX_BODY.
// What Kubernetes sets for a service called xpyd is ignored. A list is comma separated;
// lists, maps and structs may also be YAML ("[a, b]", "{a: 1}").
package config

import (
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// Options says where a configuration comes from.
type Options struct {
	File    string   // YAML; empty: none
	Environ []string // os.Environ(); nil: none
	// Open opens File; nil: os.Open, which waits for a pipe's writer.
	Open func(path string) (*os.File, error)
	// EnvAllow lists other XPYD_ variables that may be set; a trailing * matches the rest.
	// XPYD_ADMIN_TOKEN and XPYD_PARENT_FD are always allowed, unless a key claims them.
	EnvAllow []string
	// Flags that were set win over all else. FlagKeys maps a flag to its key; flags without one
	// are not configuration.
	Flags    *pflag.FlagSet
	FlagKeys map[string]string
	// Sources, unless nil, is told where each key was set.
	Sources Sources
}

// Sources is where each key was set last (as Error.Source), for settings that turn out wrong
// only in use.
type Sources map[string]string

// Locate turns an error that names a key (see KeyError) into an *Error. It returns others as
// they are.
func (s Sources) Locate(err error) error {
	if key, msg, ok := keyed(err); ok {
		return &Error{Source: s.where(key), Key: key, Msg: msg}
	}
	return err
}

// KeyError is for Validate methods: it says what is wrong with a key of the validated struct, and
// Load adds where it was set. Packages that cannot import this one may return any error with the
// method ConfigKey; a message that begins with the key is shown without it.
type KeyError struct{ Key, Msg string }

func (e *KeyError) Error() string { return e.Key + ": " + e.Msg }

// ConfigKey is the key.
func (e *KeyError) ConfigKey() string { return e.Key }

// Error is one refused setting. Load joins all that it finds.
type Error struct {
	Source string // "router.yaml:12", "XPYD_LISTEN", "--listen", or "" for a default
	Key    string // dotted; "": the file as a whole
	Msg    string
}

func (e *Error) Error() string {
	s := e.Msg
	if e.Key != "" && !SaysKey(e.Source, e.Key) {
		s = e.Key + ": " + s
	}
	if e.Source != "" {
		s = e.Source + ": " + s
	}
	return s
}

// SaysKey reports whether a source is a flag with the name of the key, which errors then leave out.
func SaysKey(source, key string) bool {
	return source == "--"+strings.NewReplacer("_", "-", ".", "-").Replace(key)
}

// maxFileBytes bounds a configuration file.
const maxFileBytes = 4 << 20

// Load fills dst, a pointer to a struct with the defaults, and calls the Validate() error methods
// of the structs in it. On error, dst is unchanged except by Validate, and the error joins an
// *Error for each problem.
func Load(dst any, o Options) error {
	v := reflect.ValueOf(dst)
	if v.Kind() != reflect.Pointer || v.IsNil() || v.Elem().Kind() != reflect.Struct {
		return fmt.Errorf("load configuration: want a pointer to a struct, not %T", dst)
	}
	next := reflect.New(v.Elem().Type())
	next.Elem().Set(v.Elem())
	l := &loader{root: next.Elem(), origin: o.Sources}
	if l.origin == nil {
		l.origin = Sources{}
	}
	if err := l.file(o.File, o.Open); err != nil {
		return err
	}
	l.environ(o)
	l.flags(o)
	if len(l.errs) == 0 {
		l.validate(next.Elem(), "", 0)
	}
	if len(l.errs) == 0 {
		v.Elem().Set(next.Elem())
	}
	return errors.Join(l.errs...)
}

// loader sets root, and collects problems and where each key was set last.
type loader struct {
	root   reflect.Value
	origin Sources
	errs   []error // each an *Error
}

func (l *loader) fail(source, key, format string, args ...any) {
	e := &Error{Source: source, Key: key, Msg: fmt.Sprintf(format, args...)}
	if !slices.ContainsFunc(l.errs, func(o error) bool { return o.Error() == e.Error() }) {
		l.errs = append(l.errs, e)
	}
}

func (l *loader) file(path string, open func(string) (*os.File, error)) error {
	if path == "" {
		return nil
	}
	if open == nil {
		open = os.Open
	}
	f, err := open(path)
	if err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err == nil && len(text) > maxFileBytes {
		err = fmt.Errorf("more than %d bytes", maxFileBytes)
	}
	if err != nil {
		return fmt.Errorf("read configuration %s: %w", path, err)
	}
	l.yaml(path, text)
	return nil
}

// where returns the source of a key, or of the nearest section around it that has one.
func (s Sources) where(key string) string {
	for key != "" {
		if source, ok := s[key]; ok {
			return source
		}
		key = key[:max(0, strings.LastIndexAny(key, ".["))]
	}
	return ""
}

// maxDepth bounds the nesting of configuration types.
const maxDepth = 16

// validate calls Validate on every struct in v, innermost first.
func (l *loader) validate(v reflect.Value, key string, depth int) {
	if depth > maxDepth {
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			l.validate(v.Elem(), key, depth+1)
		}
		return
	case reflect.Slice:
		for i := range v.Len() {
			l.validate(v.Index(i), fmt.Sprintf("%s[%d]", key, i), depth+1)
		}
		return
	case reflect.Map:
		for _, k := range sortedKeys(v) {
			elem := reflect.New(v.Type().Elem()).Elem()
			elem.Set(v.MapIndex(k))
			l.validate(elem, join(key, k.String()), depth+1)
		}
		return
	case reflect.Struct:
	default:
		return
	}
	for _, f := range fields(v.Type()) {
		l.validate(v.FieldByIndex(f.index), join(key, f.name), depth+1)
	}
	if c, ok := v.Addr().Interface().(interface{ Validate() error }); ok {
		l.invalid(c.Validate(), key)
	}
}

// invalid adds the result of a Validate method.
func (l *loader) invalid(err error, section string) {
	if err == nil {
		return
	}
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range many.Unwrap() {
			l.invalid(e, section)
		}
		return
	}
	key, msg := section, err.Error()
	if k, m, ok := keyed(err); ok {
		key, msg = join(section, k), m
	}
	l.fail(l.origin.where(key), key, "%s", msg)
}

// keyed returns the key that an error names, and its message without it.
func keyed(err error) (key, msg string, ok bool) {
	var e interface {
		error
		ConfigKey() string
	}
	if !errors.As(err, &e) {
		return "", "", false
	}
	return e.ConfigKey(), strings.TrimPrefix(e.Error(), e.ConfigKey()+": "), true
}

func join(section, key string) string {
	if section == "" || key == "" {
		return section + key
	}
	return section + "." + key
}
