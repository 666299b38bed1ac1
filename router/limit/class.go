package limit

import "strconv"

// Class is a priority; as with vLLM, the lower number goes first.
type Class uint8

// The classes.
const (
	High Class = iota
	Normal
	Low
	Classes = iota
)

var classNames = [Classes]string{"high", "normal", "low"}

func (c Class) String() string { return classNames[c] }

// ParseClass reads a class's name or a vLLM priority: below 0 is high, 0 normal, above 0
// low.
func ParseClass(s string) (Class, bool) {
	for c, name := range classNames {
		if s == name {
			return Class(c), true
		}
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return Normal, false
	}
	return ClassOf(n), true
}

// ClassOf is the class of a vLLM priority.
func ClassOf(priority int64) Class {
	switch {
	case priority < 0:
		return High
	case priority > 0:
		return Low
	}
	return Normal
}
